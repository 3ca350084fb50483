"""Makes the backend's name known to torch.distributed, without importing ringcomm.

torch calls register() at the end of `import torch` (entry point group `torch.backends`). An
exception here would break `import torch`, and an import of ringcomm would slow it down and find
torch half made: so this module stands alone, imports torch.distributed only, and registers a
creator that imports the rest when a group is made.
"""

import warnings
from typing import Any


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    from ringcomm.backend import create

    return create(dist_backend_opts, pg_options)


def register() -> None:
    """Registers "ringcomm" for CPU and CUDA tensors; never raises, may be called again."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or "ringcomm" in dist.Backend.backend_list:
            return
        # A list: torch iterates over `devices`, and a string would be taken letter by letter.
        dist.Backend.register_backend(
            "ringcomm", _create, extended_api=True, devices=["cpu", "cuda"]
        )
    except Exception as error:
        warnings.warn(
            f"ringcomm could not register with torch.distributed: {error!r}", stacklevel=2
        )
