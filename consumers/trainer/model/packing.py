"""Attention over packed sequences (data/packed.py), each of which sees only itself.

It is registered with transformers, so any model that takes its attention from there can pack; whether a model computes
the same with it is tried out. On a GPU in a 16-bit type the kernel is that of the package flash_attn where it is
installed, else PyTorch's own variable-length one. Elsewhere all sequences of one length that lie side by side have a
causal call of their own, which on a CPU is by far the fastest exact way: a block-diagonal mask computes every pair, and
flex attention has no backward there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from consumers.trainer.data.packed import Bounds, Packed, lay_out
from consumers.trainer.distributed.context_parallel import exchange_to_heads, exchange_to_tokens
from consumers.trainer.distributed.layout import has_plain_attention, has_windows
from schemas.arithmetic.attention import Places, attend_sequences

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

KernelName: TypeAlias = Literal["flash_attn", "varlen", "each"]
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Bounds, float | None, int | None], Tensor]
"""Attention of N tokens in R sequences: (query, key, value, bounds, scale, window) to [1, N, H, D].

query: [1, H, N, D]. key, value: [1, H or fewer, N, D]. bounds: of the sequences. scale: of the scores, 1/sqrt(D) when
None. window: how many tokens a token sees, itself the last of them; all before it when None.
"""
OLDEST_GPU = (8, 0)
"""Lowest compute capability at which both flash kernels work."""
LARGEST_HEAD = 256
"""Largest size of a head that both flash kernels take."""
TRIED, TRIED_WINDOW = (9, 257, 246), 100
"""Tokens of the sequences, and of a window, with which a kernel is tried: more than one block of them."""
SHORT = 3
"""Tokens of each window in the trial of a model."""
ATTENTION = "tidemill_packed"
"""Name of the attention. transformers makes no mask for it, for which it would read the positions."""

log = structlog.get_logger()


@torch.no_grad()
def switch_to_packing(model: PreTrainedModel) -> bool:
    """Give the model packed attention if it computes the same with it, and return whether it does.

    Short sequences, two of which begin alike, are computed packed and side by side: a model with a state that runs on
    differs. So does one to which transformers gives a mask made from positions, which restart where a sequence begins,
    but not where shared tokens end. Sliding windows are made shorter than these sequences. Chunks show only in long
    ones, so models that have them stay as they are, as do those with an attention of their own.
    """
    config = model.config.get_text_config()
    device = model.device
    if device.type == "meta" or not has_plain_attention(config):
        return False
    tokens = torch.arange(1, 25, device=device).reshape(3, 8) % config.vocab_size
    tokens[2, :3] = tokens[0, :3]
    lengths = torch.tensor([8, 5, 6], device=device)
    layout = lay_out(tokens, torch.arange(8, device=device) < lengths[:, None], lengths, share=True)
    former, found = model.config._attn_implementation, None
    with _short_windows(model):
        alone = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        wanted = alone.flatten(0, 1)[layout.loss]
        try:
            use_packing(model)
            # Of a model that keeps an attention of its own, rounding to 16 bits may hide what that makes of sequences.
            if is_packed(model):
                found = model.base_model(**layout.arguments(tokens), use_cache=False).last_hidden_state
                found = layout.states_of(found)
        except (TypeError, ValueError):
            pass
    if found is not None and found.shape == wanted.shape:
        error = (found - wanted).float().norm() / alone.float().norm().clamp(min=1e-9)
        if float(error) < (1e-4 if found.dtype == torch.float32 else 3e-2):
            return True
    model.set_attn_implementation(former)
    return False


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make windows shorter than a trial's sequences, both in the configuration, for masks, and in the layers."""
    holders: list[Any] = [model.config.get_text_config(), *model.modules()]
    before = [(each, window) for each in holders if isinstance(window := getattr(each, "sliding_window", None), int)]
    try:
        for each, _ in before:
            each.sliding_window = SHORT
        yield
    finally:
        for each, window in before:
            each.sliding_window = window


@cache
def register_attention() -> None:
    """Register the packed attention with transformers by its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def use_packing(model: PreTrainedModel) -> None:
    """Give a model packed attention; a vision tower's is not causal, and stays as it is."""
    register_attention()
    model.set_attn_implementation({"text_config": ATTENTION} if hasattr(model.config, "vision_config") else ATTENTION)


def is_packed(model: PreTrainedModel) -> bool:
    """Return whether the model has the attention that ``use_packing`` gives it."""
    return bool(model.config.get_text_config()._attn_implementation == ATTENTION)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: Packed | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence, or within each padded row if nothing is packed.

    query: [B, H, N, D]; key, value: [B, H or fewer, N, D]. Returns [B, N, H, D]. N is the number of tokens that this
    rank computes. ValueError if the model asks for another kind of attention.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("packed attention has no soft cap and no sinks")
    if attention_mask is not None:
        raise ValueError("packed attention has no mask of the model's own")
    if packed is None:
        return _attend_plainly(query, key, value, scaling, sliding_window).transpose(1, 2), None
    kernel = KERNELS[choose_kernel(query.device, query.dtype)]
    if packed.exact is not None:
        kernel = _exactly(kernel, packed.exact)
    if packed.shared is not None:
        shared = packed.shared
        query, key, value = (shared.to_all(tensor, 2) for tensor in (query, key, value))
        return shared.to_distinct(kernel(query, key, value, packed.bounds, scaling, sliding_window), 1), None
    if packed.context is None:
        return kernel(query, key, value, packed.bounds, scaling, sliding_window), None
    context = packed.context
    query, key, value = (exchange_to_heads(tensor, context) for tensor in (query, key, value))
    out = kernel(query, key, value, packed.bounds, scaling, sliding_window)
    return exchange_to_tokens(out.transpose(1, 2), context).transpose(1, 2), None


def _exactly(kernel: Kernel, places: Places) -> Kernel:
    """Compute in a fixed order, with the gradient of ``kernel``."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None
    ) -> Tensor:
        if window is not None and window < bounds.longest:
            raise ValueError("exact mode has no sliding windows")

        def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return kernel(query, key, value, bounds, scale, None)

        return attend_sequences(query, key, value, places, scale, plain)

    return call


def choose_kernel(device: torch.device, dtype: torch.dtype) -> KernelName:
    """Choose the fastest kernel that this machine has for tensors on ``device`` in ``dtype``."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "each"
    if torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return "each"
    return "flash_attn" if _installed("flash_attn") else "varlen"


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _flash(kernel: Kernel) -> Kernel:
    """Pad heads with zeros to one size, a multiple of 8: latent attention (arXiv:2405.04434) has two sizes."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None
    ) -> Tensor:
        size = value.shape[-1]
        width = -(-max(query.shape[-1], size) // 8) * 8
        if width > LARGEST_HEAD:
            return cast(Tensor, _each(query, key, value, bounds, scale, window))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        query, key, value = (
            tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))
            for tensor in (query, key, value)
        )
        return kernel(query, key, value, bounds, scale, window).narrow(-1, 0, size)

    return call


@_flash
def _flash_attn(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None
) -> Tensor:
    """Call the kernel of the package flash_attn, which takes grouped heads as they are (arXiv:2307.08691)."""
    from flash_attn import flash_attn_varlen_func

    given = _flat(query, key, value, bounds)
    out = flash_attn_varlen_func(*given, softmax_scale=scale, causal=True, window_size=_before(window))
    return cast(Tensor, out)[None]


@_flash
def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None
) -> Tensor:
    given, grouped = _flat(query, key, value, bounds), _grouped(query, key)
    return cast(Tensor, varlen_attn(*given, scale=scale, window_size=_before(window), enable_gqa=grouped))[None]


def _before(window: int | None) -> tuple[int, int]:
    """Return how many tokens before and after itself a token sees, as flash kernels want it: -1 for all."""
    return (-1 if window is None else window - 1, 0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None) -> Tensor:
    # Not compiled: how many sequences there are would be a part of the program.
    # Neighbours of one length are one call, without any copy or padding: load_balancing.py puts them side by side.
    runs = [(length, len(list(same))) for length, same in groupby(bounds.lengths)]
    parts = zip(
        *(tensor.split([length * count for length, count in runs], 2) for tensor in (query, key, value)), strict=True
    )
    found = []
    for (length, count), part in zip(runs, parts, strict=True):
        q, k, v = (tensor[0].unflatten(1, (count, length)).transpose(0, 1) for tensor in part)
        out = _attend_plainly(q, k, v, scale, window)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[None]


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None = None
) -> Tensor:
    grouped = _grouped(query, key)
    if grouped and query.device.type != "cpu":
        # In float32 no kernel of a GPU takes grouped heads without scores of N x N.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        grouped = False
    length, mask = query.shape[-2], None
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _flat(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds) -> tuple[Any, ...]:
    """Return the first arguments of a flash kernel: tensors as [N, H, D] or fewer heads, and bounds of both sides."""
    tensors = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return *tensors, bounds.starts, bounds.starts, bounds.longest, bounds.longest


def _grouped(query: Tensor, key: Tensor) -> bool:
    return key.shape[1] != query.shape[1]


def try_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Try training's kernel with the heads of a text model's ``config``; if it fails, use ``each``, and return why."""
    name = choose_kernel(device, dtype)
    if name == "each":
        return ""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    latent = getattr(config, "qk_rope_head_dim", None)
    if latent:
        size = config.qk_nope_head_dim + latent
    groups = heads if latent else getattr(config, "num_key_value_heads", None) or heads
    shapes = (heads, size), (groups, size), (groups, getattr(config, "v_head_dim", None) or size)
    total = sum(TRIED)
    query, key, value = given = [
        torch.randn(1, count, total, width, device=device, dtype=dtype, requires_grad=True) for count, width in shapes
    ]
    bounds, problem = Bounds(TRIED, device), ""
    windows = [None, TRIED_WINDOW] if has_windows(config) else [None]
    try:
        for window in windows:
            found, wanted = (kernel(query, key, value, bounds, None, window) for kernel in (KERNELS[name], _each))
            upstream = torch.randn_like(wanted)
            gradients = zip(*(torch.autograd.grad(out, given, upstream) for out in (found, wanted)), strict=True)
            problem = problem or ("" if _close(found, wanted) else "its result is wrong")
            if not problem and not all(_close(*pair) for pair in gradients):
                problem = "its gradient is wrong"
    except (RuntimeError, ValueError, ImportError) as error:
        problem = str(error).splitlines()[0]
    if problem:
        log.warning("an attention kernel does not work here; each sequence is computed alone", kernel=name, why=problem)
        KERNELS[name] = _each
    return problem


def _close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).float().norm() <= 0.05 * wanted.float().norm())


KERNELS: dict[KernelName, Kernel] = {"flash_attn": _flash_attn, "varlen": _varlen, "each": _each}
