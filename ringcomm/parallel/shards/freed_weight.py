"""Parameters whose memory is freed: reading one raises instead of reading address 0."""

from __future__ import annotations

from typing import Any

from torch import nn

from ringcomm.torch_names import without_torch_function

# What does not read values; of properties the name of the attribute.
_ALLOWED = frozenset(
    "shape dtype device layout requires_grad requires_grad_ grad grad_fn is_leaf output_nr ndim"  # noqa: SIM905
    " dim size stride storage_offset numel nelement element_size nbytes itemsize is_meta is_cuda"
    " is_cpu is_sparse is_quantized is_nested is_contiguous is_floating_point is_complex"
    " is_inference names has_names get_device data_ptr untyped_storage retain_grad register_hook"
    " register_post_accumulate_grad_hook _version __len__ __hash__ _backward_hooks"
    " _post_accumulate_grad_hooks empty_like zeros_like ones_like full_like rand_like randn_like"
    " new_empty new_zeros new_ones new_full new_tensor".split()
)


class FreedWeight(nn.Parameter):
    """The class of a parameter while its memory is freed; raises when its values are read.

    Storages of size 0 alone do not protect: kernels read from address 0.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RuntimeError for all but attributes, hooks and new tensors of the same shape."""
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
        # get_gradient_edge() makes a view, and drops it.
        is_edge = name == "view_as" and args[0] is args[1]
        if name not in _ALLOWED and not is_edge:
            raise RuntimeError(
                f"{name}() of a weight that is sharded and freed: read it inside"
                " WeightShards.gather(), after optimizer.close() of ZeRO-Infinity, or by"
                " ringcomm.parallel.get_state_dict(); run it by calling the whole model"
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without values."""
        return f"FreedWeight(shape={tuple(self.shape)}, dtype={self.dtype})"
