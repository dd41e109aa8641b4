"""Packing: a micro-batch's sequences lie one after the other in one row, without padding, and each sees only itself.

The attention is registered with transformers, so any model that takes its attention from there can pack; whether a
model computes the same with it is tried out. On a GPU in a 16-bit type the kernel is that of the package flash_attn
where it is installed, else PyTorch's own variable-length one. Elsewhere all sequences of one length that lie side by
side have a causal call of their own, which on a CPU is by far the fastest exact way: a block-diagonal mask computes
every pair, and flex attention has no backward there.

Tokens that several sequences begin with are computed once: the samples of a prompt begin alike, and so do an agent's
calls. In a causal model the state of a token depends on itself and what is before it, so it is the same in all of them.
Whatever works on each token alone (projections, norms, the MLP) needs it once; attention gets all tokens of all
sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from consumers.trainer.data.load_balancing import WORTH_IT
from consumers.trainer.distributed.context_parallel import exchange_to_heads, exchange_to_tokens, gather_tokens
from consumers.trainer.distributed.layout import has_plain_attention
from consumers.trainer.distributed.parts import Part
from schemas.arithmetic.attention import Places, attend_sequences
from schemas.arithmetic.products import TILE, fill

KernelName: TypeAlias = Literal["flash_attn", "varlen", "each"]
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]
"""Attention of N tokens in R sequences: (query, key, value, starts, longest, scale) to [1, N, H, D].

query: [1, H, N, D]. key, value: [1, H or fewer, N, D]. starts: int32 [R+1], where each sequence begins, and N. longest:
tokens. scale: of the scores, 1/sqrt(D) when None.
"""
OLDEST_GPU = (8, 0)
"""Lowest compute capability at which both flash kernels work."""
LARGEST_HEAD = 256
"""Largest size of a head that both flash kernels take."""
TRIED, LONGEST_TRIED = (0, 9, 266, 512), 257
"""Where the sequences begin with which a kernel is tried, and tokens of the longest: more than one block of them."""
ATTENTION = "tidemill_packed"

log = structlog.get_logger()


class _Repeat(torch.autograd.Function):
    """Values at ``index`` in dimension ``dim``, some of them many times; their gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.size = dim, values.shape[dim]
        return values.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        shape = [*gradient.shape[: ctx.dim], ctx.size, *gradient.shape[ctx.dim + 1 :]]
        # In 16 bits a sum of many stops growing.
        precise = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(shape, dtype=precise, device=gradient.device)
        return total.index_add_(ctx.dim, index, gradient.to(precise)).to(gradient.dtype), None, None


class SharedPrefixes(NamedTuple):
    """M distinct tokens among the N of packed sequences.

    spread: int64 [N], which of the distinct ones each token is. first: int64 [M], one of the N tokens that it is.
    """

    spread: Tensor
    first: Tensor

    def to_all(self, values: Tensor, dim: int, own: Tensor | None = None) -> Tensor:
        """Spread values of the M distinct tokens in dimension ``dim`` to all N, or to those in ``own``, bool [N]."""
        index = self.spread if own is None else self.spread[own]
        # PyTorch gives apply no types.
        return cast(Tensor, _Repeat.apply(values, dim, index))  # type: ignore[no-untyped-call]

    def to_distinct(self, values: Tensor, dim: int) -> Tensor:
        """Return the values of all N tokens in dimension ``dim``, at the M distinct ones."""
        return values.index_select(dim, self.first)


@torch.no_grad()
def find_shared_prefixes(inputs: Tensor, lengths: Tensor) -> SharedPrefixes | None:
    """Find what the rows share; None when that is less than WORTH_IT of them.

    inputs: int64 [R, T], right-padded, of which the first ``lengths``, int64 [R], count. The tokens are numbered as
    they are packed: row after row, without padding.
    """
    place = torch.arange(inputs.shape[1], device=inputs.device)
    there = place < lengths[:, None]
    # Rows with the longest common prefix are neighbours in this order.
    order = torch.unique(inputs.masked_fill(~there, -1), dim=0, return_inverse=True)[1].argsort()
    ids, known = inputs[order], there[order]
    same = (ids[1:] == ids[:-1]) & known[1:] & known[:-1]
    shared = F.pad(same.cumprod(1).sum(1), (1, 0))
    # A token is that of the last row at or above its own whose prefix with the one before ended earlier.
    row = torch.arange(len(ids), device=inputs.device)[:, None]
    owner = torch.where(place >= shared[:, None], row, 0).cummax(0).values
    number = (there.flatten().cumsum(0) - 1).view_as(there)
    same_as = torch.empty_like(number)
    same_as[order] = number[order].gather(0, owner)
    found = same_as[there]
    is_first = found == torch.arange(len(found), device=inputs.device)
    if len(found) - int(is_first.sum()) < WORTH_IT * len(found):
        return None
    return SharedPrefixes((is_first.cumsum(0) - 1)[found], is_first.nonzero()[:, 0])


@dataclass(frozen=True)
class Packed:
    """R sequences as one row of N tokens, in the form that a model's base takes.

    ids, positions: int64 [1, N]. starts: int32 [R+1], where each sequence begins, and N. longest: tokens. rows: bool
    [R, T], the places of the N tokens in the padded micro-batch. context: the ranks that share the tokens, each N / C
    of them; one more sequence then makes N a multiple of C, and is in no row. shared: the tokens that are computed once
    for several sequences; the model then returns states of the M distinct ones, [1, M, D]. exact: the places of tokens
    that are computed as generators do with generator.exact; N, or M, is then a multiple of TILE.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    longest: int
    rows: Tensor
    context: Part | None = None
    shared: SharedPrefixes | None = None
    exact: Places | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward, which every attention layer gets, by transformers' names."""
        others: dict[str, Any] = {} if self.context is None else {"context": self.context}
        ids, positions = self._own(self.ids, 1), self._own(self.positions, 1)
        if self.exact is not None:
            others["exact"] = self.exact
        if self.shared is not None:
            others["shared"] = self.shared
            ids, positions = self.shared.to_distinct(ids, 1), self.shared.to_distinct(positions, 1)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
            **others,
        }

    def states_of(self, hidden: Tensor, own: Tensor) -> Tensor:
        """Return states [K, D] of this rank's K tokens that ``own``, bool [N / C], marks. hidden: from the model."""
        return hidden[own] if self.shared is None else self.shared.to_all(hidden, 0, own)

    def part_of(self, values: Tensor) -> Tensor:
        """Return values [R, T, ...] at this rank's tokens: [N / C, ...], 0 or false in the filling sequence."""
        found = values[self.rows]
        return self._own(F.pad(found, (0, 0) * (found.ndim - 1) + (0, self.ids.shape[1] - len(found))))

    def whole(self, values: Tensor, own: Tensor, mask: Tensor) -> Tensor:
        """Put together what each rank has: values [K] at the K tokens of its part that ``own``, bool [N / C], marks.

        Returns [M], at the M places of ``mask``, bool [R, T], in the order of its rows.
        """
        if self.context is None:
            return values
        spread = values.new_zeros(len(own)).masked_scatter(own, values)
        return gather_tokens(spread, self.context)[: int(self.rows.sum())][mask[self.rows]]

    def _own(self, values: Tensor, dim: int = 0) -> Tensor:
        return values if self.context is None else self.context.slice(values, dim)


def pack(
    inputs: Tensor, lengths: Tensor, context: Part | None = None, share: bool = False, exact: bool = False
) -> Packed:
    """Pack the first ``lengths`` (int64 [R], 1 or more) tokens of each row of ``inputs``, int64 [R, T].

    context: the ranks that share the tokens, all of which give the same. share: compute what several rows begin with
    once; one rank that has all tokens can. exact: as Packed has it.
    """
    shared = find_shared_prefixes(inputs, lengths) if share and context is None else None
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    rows = positions < lengths[:, None]
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    ids, positions, longest = inputs[rows], positions[rows], inputs.shape[1]
    if exact and shared is not None:
        # The first token stands for what fills the last tile, of which no sequence has a token.
        shared = SharedPrefixes(shared.spread, fill(shared.first))
    size = context.size if context is not None else TILE if exact and shared is None else 1
    filler = -len(ids) % size
    if filler:
        ids = F.pad(ids, (0, filler))
        positions = torch.cat([positions, torch.arange(filler, device=ids.device)])
        starts, longest = F.pad(starts, (0, 1), value=len(ids)), max(longest, filler)
    places = Places.of_sequences(starts) if exact else None
    return Packed(ids[None], positions[None], starts, longest, rows, context, shared, places)


@torch.no_grad()
def switch_to_packing(model: PreTrainedModel, max_length: int | None = None) -> bool:
    """Give the model packed attention if it computes the same with it, and return whether it does.

    Short sequences, two of which begin alike, are computed packed and side by side: a model with a state that runs on
    differs. So does one to which transformers gives a mask made from positions, which restart where a sequence begins,
    but not where shared tokens end. Sliding windows and chunks show only in long sequences, so models that have them
    stay as they are, unless the window covers ``max_length`` tokens, as do those with an attention of their own.
    """
    config = model.config.get_text_config()
    device = model.device
    if device.type == "meta" or not has_plain_attention(config, max_length):
        return False
    tokens = torch.arange(1, 25, device=device).reshape(3, 8) % config.vocab_size
    tokens[2, :3] = tokens[0, :3]
    lengths = torch.tensor([8, 5, 6], device=device)
    alone = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    former, found = model.config._attn_implementation, None
    try:
        use_packing(model)
        # Of a model that keeps an attention of its own, rounding to 16 bits may hide what that makes of sequences.
        if model.config.get_text_config()._attn_implementation == ATTENTION:
            packed = pack(tokens, lengths, share=True)
            hidden = model.base_model(**packed.arguments(), use_cache=False).last_hidden_state[0]
            found = packed.states_of(hidden, packed.rows[packed.rows])
    except (TypeError, ValueError):
        pass
    if found is not None and found.shape == alone[packed.rows].shape:
        error = (found - alone[packed.rows]).float().norm() / alone.float().norm().clamp(min=1e-9)
        if float(error) < (1e-4 if found.dtype == torch.float32 else 3e-2):
            return True
    model.set_attn_implementation(former)
    return False


def use_packing(model: PreTrainedModel) -> None:
    """Give a model packed attention; a vision tower's is not causal, and stays as it is."""
    model.set_attn_implementation({"text_config": ATTENTION} if hasattr(model.config, "vision_config") else ATTENTION)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    context: Part | None = None,
    shared: SharedPrefixes | None = None,
    exact: Places | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence, or within each padded row if there are no starts.

    query: [B, H, N, D]; key, value: [B, H or fewer, N, D]. Returns [B, N, H, D]. context: the ranks that have N / C
    tokens each of the sequences. shared: N is the number of distinct tokens of the sequences. ValueError if the model
    asks for another kind of attention.
    """
    longest = key.shape[-2] if cu_seq_lens_q is None else max_length_q
    if softcap is not None or s_aux is not None or (sliding_window is not None and sliding_window < longest):
        raise ValueError("packed attention has no soft cap, no sinks and no sliding window that leaves tokens out")
    if cu_seq_lens_q is None:
        # One query after a cache sees all of it.
        causal = attention_mask is None and query.shape[2] > 1
        out = _attend_plainly(query, key, value, scaling, causal, attention_mask)
        return out.transpose(1, 2), None
    if attention_mask is not None:
        raise ValueError("packed attention has no mask of the model's own")
    kernel = KERNELS[choose_kernel(query.device, query.dtype)]
    if exact is not None:
        kernel = _exactly(kernel, exact)
    if shared is not None:
        query, key, value = (shared.to_all(tensor, 2) for tensor in (query, key, value))
        out = kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling)
        return shared.to_distinct(out, 1), None
    if context is None:
        return kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    query, key, value = (exchange_to_heads(tensor, context) for tensor in (query, key, value))
    out = kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling)
    return exchange_to_tokens(out.transpose(1, 2), context).transpose(1, 2), None


def _exactly(kernel: Kernel, places: Places) -> Kernel:
    """Compute in a fixed order, with the gradient of ``kernel``."""

    def call(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
        def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return kernel(query, key, value, starts, longest, scale)

        return attend_sequences(query, key, value, places, scale, plain)

    return call


def make_mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """Make the mask for padding or a cache, as in generation; training has neither and gets None."""
    if attention_mask is None and q_length == kv_length:
        return None
    mask: Tensor | None = sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **others)
    return mask


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
    """Give a flash kernel the sizes that it takes: heads of one size for all three, a multiple of 8.

    Multi-head latent attention has other sizes of queries and keys than of values (arXiv:2405.04434). Added zeros
    change neither scores nor values.
    """

    def call(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
        size = value.shape[-1]
        width = -(-max(query.shape[-1], size) // 8) * 8
        if width > LARGEST_HEAD:
            return cast(Tensor, _each(query, key, value, starts, longest, scale))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        query, key, value = (
            tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))
            for tensor in (query, key, value)
        )
        return kernel(query, key, value, starts, longest, scale).narrow(-1, 0, size)

    return call


@_flash
def _flash_attn(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    """Call the kernel of the package flash_attn, which takes grouped heads as they are (arXiv:2307.08691)."""
    from flash_attn import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        *_flat(query, key, value), starts, starts, longest, longest, softmax_scale=scale, causal=True
    )
    return cast(Tensor, out)[None]


@_flash
def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    out = varlen_attn(
        *_flat(query, key, value),
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=_grouped(query, key),
    )
    return cast(Tensor, out)[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    # Not compiled: how many sequences there are would be a part of the program.
    lengths = [end - start for start, end in pairwise(starts.tolist())]
    # Neighbours of one length are one call, without any copy or padding: load_balancing.py puts them side by side.
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    parts = zip(
        *(tensor.split([length * count for length, count in runs], 2) for tensor in (query, key, value)), strict=True
    )
    found = []
    for (length, count), part in zip(runs, parts, strict=True):
        q, k, v = (tensor[0].unflatten(1, (count, length)).transpose(0, 1) for tensor in part)
        out = _attend_plainly(q, k, v, scale)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[None]


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Call PyTorch's attention, for [B, H, N, D]."""
    grouped = _grouped(query, key)
    if grouped and query.device.type != "cpu":
        # In float32 no kernel of a GPU takes grouped heads without scores of N x N, nor in 16 bits with a mask.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _flat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors as [N, H, D], or fewer heads."""
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return key.shape[1] != query.shape[1]


def try_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Try the kernel that training uses here, forward and backward, and replace it by ``each`` if it fails.

    Returns why it fails, or nothing. config: of a text model in transformers, for the number and sizes of its heads.
    """
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
    total = TRIED[-1]
    query, key, value = given = [
        torch.randn(1, count, total, width, device=device, dtype=dtype, requires_grad=True) for count, width in shapes
    ]
    starts = torch.tensor(TRIED, device=device, dtype=torch.int32)
    try:
        found, wanted = (kernel(query, key, value, starts, LONGEST_TRIED, None) for kernel in (KERNELS[name], _each))
        upstream = torch.randn_like(wanted)
        gradients = zip(*(torch.autograd.grad(out, given, upstream) for out in (found, wanted)), strict=True)
        problem = "" if _close(found, wanted) else "its result is wrong"
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
AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, make_mask)
