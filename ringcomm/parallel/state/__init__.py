"""State dicts of models and optimizers on any mesh: sharded or full."""

from ringcomm.parallel.state.state_dict import get_state_dict, set_state_dict

__all__ = ["get_state_dict", "set_state_dict"]
