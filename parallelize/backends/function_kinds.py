"""Kinds of torch functions: which of them work element by element, and which need a full tensor."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["EXPORTS", "KINDS", "Kind", "is_in_place", "kind_of"]


class Kind(enum.Enum):
    """What a torch function does with its tensors."""

    ELEMENTWISE = enum.auto()  # each element of the result needs only the elements of its place
    REDUCTION = enum.auto()  # one number
    RANDOM = enum.auto()  # random numbers in the shape of the first tensor
    NEW = enum.auto()  # a new tensor of a given size, with the first tensor's dtype and device
    METADATA = enum.auto()  # reads no element, or does what DTensor does
    GRADIENT = enum.auto()  # takes the leaves of a graph
    GET = enum.auto()  # reads an attribute
    SET = enum.auto()  # sets an attribute
    VIEW_ATTRIBUTE = enum.auto()  # attributes that are views of other shapes
    STORAGE = enum.auto()  # lets others read the storage later
    OTHER = enum.auto()


_ELEMENTWISE = """
add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power sqrt rsqrt square
abs absolute neg negative positive sign sgn exp exp2 expm1 log log1p log2 log10 sin cos tan sinh cosh tanh asin acos
atan atan2 sigmoid logit relu clamp clip clamp_min clamp_max minimum maximum fmin fmax lerp addcmul addcdiv where copy
zero fill reciprocal nan_to_num isnan isinf isfinite eq ne lt le gt ge not_equal greater less greater_equal less_equal
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor masked_fill round floor
ceil trunc frac erf erfc hypot xlogy threshold hardtanh leaky_relu softplus clone to float double half bfloat16 type
type_as cpu cuda contiguous __deepcopy__ conj resolve_conj resolve_neg
__radd__ __rmul__ __rsub__ __rdiv__ __rtruediv__ __rpow__ __pow__ __rfloordiv__ __floordiv__ __truediv__ __div__
__add__ __sub__ __mul__ __neg__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__
"""

_REDUCTION = """
sum mean norm linalg_vector_norm vector_norm amax amin max min any all _foreach_norm
"""
_RANDOM = """
rand_like randn_like randint_like normal_ uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_
"""
_NEW = """
new_empty new_zeros new_ones new_full new_tensor new_empty_strided
"""
_METADATA = """
size dim ndimension numel nelement element_size stride is_contiguous storage_offset __len__ is_floating_point
is_complex is_signed requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad detach get_device
is_same_size __hash__ is_inference result_type empty_like zeros_like ones_like full_like is_shared
_is_view _has_compatible_shallow_copy_type is_tensor is_pinned dim_order
"""
_STORAGE = """
numpy __array__ data_ptr untyped_storage storage __dlpack__ share_memory_ __cuda_array_interface__
"""
_EXPORTS_NAMES = """
clone to float double half bfloat16 type type_as cpu cuda contiguous __deepcopy__
"""
_IN_PLACE_OPERATORS_NAMES = """
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__ __setitem__
"""

KINDS: Mapping[Kind, frozenset[str]] = {
    Kind.ELEMENTWISE: frozenset({*_ELEMENTWISE.split(), *(f"{name}_" for name in _ELEMENTWISE.split())}),
    Kind.REDUCTION: frozenset(_REDUCTION.split()),
    Kind.RANDOM: frozenset(_RANDOM.split()),
    Kind.NEW: frozenset(_NEW.split()),
    Kind.METADATA: frozenset(_METADATA.split()),
    Kind.GRADIENT: frozenset({"grad", "backward"}),
    Kind.GET: frozenset({"__get__"}),
    Kind.SET: frozenset({"__set__", "__delete__"}),
    Kind.VIEW_ATTRIBUTE: frozenset({"T", "mT", "H", "mH", "real", "imag"}),
    Kind.STORAGE: frozenset(_STORAGE.split()),
}
"""Kind -> names of its functions."""

EXPORTS = frozenset(_EXPORTS_NAMES.split())
"""Element-wise functions whose result is a snapshot, such as one to save: for a copy, a full tensor."""

_KIND_OF_NAME = {name: kind for kind, names in KINDS.items() for name in names}
_IN_PLACE_OPERATORS = frozenset(_IN_PLACE_OPERATORS_NAMES.split())


def kind_of(function: Callable[..., Any]) -> Kind:
    """Return the kind of a function that a TorchFunctionMode has intercepted."""
    return _kind_of_name(getattr(function, "__name__", ""))


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name: str = getattr(function, "__name__", "")
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _kind_of_name(name: str) -> Kind:
    found = _KIND_OF_NAME.get(name)
    is_of_lists = name.lstrip("_").startswith(("foreach_", "fused_"))
    if found is None and is_of_lists and name.strip("_") != "foreach_max":
        return Kind.ELEMENTWISE
    return Kind.OTHER if found is None else found
