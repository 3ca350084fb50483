"""State dicts of models and optimizers on any mesh: in parts, or whole."""

from ringcomm.parallel.state.state_dict import get_state_dict, set_state_dict

__all__ = ["get_state_dict", "set_state_dict"]
