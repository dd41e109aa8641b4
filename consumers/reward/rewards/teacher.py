"""Teachers: models that give log-probabilities of the tokens that the policy sampled, for distillation.

A teacher reads the policy's token ids, so it needs the policy's tokenizer; deploy/checks/teachers.py compares the two
before a run starts. torch is loaded in the worker alone.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from consumers.reward.rewards.http import check_url, key_headers, post_json, server
from consumers.reward.rewards.reward_model import batches, same_tokenizer
from consumers.reward.rewards.terms import Positive, reward
from schemas.codec import Array
from schemas.messages import Segment, rows_of


@lru_cache(maxsize=2)
def _load(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path)


@reward(
    needs=("torch", "train"),
    settings=True,
    prepare=lambda model, dtype="float32", device="cpu", **_: _load(model, dtype, device),
    teacher=True,
)
def teacher(
    prompts: list[str],
    completions: list[str],
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    *,
    model: str,
    row_ids: list[list[int]],
    segments: list[list[Segment]],
    sampling_temperature: list[float],
    batch_tokens: Positive = 4096,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
) -> list[npt.NDArray[np.float32]]:
    """Return log-probabilities by the causal model in the folder ``model``, at the temperatures of the samples.

    Its worker loads it when it starts. Rows of similar length go through it together, ``batch_tokens`` at most in one
    pass, whose logits are all in memory. ``device``: cpu, or a GPU such as cuda:0.
    """
    causal_lm, tokenizer = _load(model, dtype, device)
    size = causal_lm.get_input_embeddings().num_embeddings
    found, rows = [], []
    for number, texts in enumerate(zip(prompts, completions, prompt_ids, completion_ids, row_ids, strict=True)):
        ids = np.array(prompt_ids[number] + completion_ids[number], dtype=np.int64)
        if ids.max(initial=0) >= size or not same_tokenizer(tokenizer, *texts):
            raise ValueError(f"the teacher {model} has another tokenizer than the policy, whose token ids it is given")
        found.append(np.zeros(len(ids), dtype=np.float32))
        rows += [(number, row, ids[row.places].tolist()) for row in rows_of(segments[number], len(ids))]
    for some in batches([len(ids) for _, _, ids in rows], batch_tokens):
        temperatures = [sampling_temperature[rows[r][0]] for r in some]
        for r, values in zip(some, _forward(causal_lm, [rows[r][2] for r in some], temperatures), strict=True):
            number, row, _ = rows[r]
            found[number][row.places[row.shared :]] = values[row.shared :]
    return found


def _forward(causal_lm: Any, rows: Sequence[list[int]], temperatures: Sequence[float]) -> Any:
    """Return the log-probability of each token of each row; that of the first is 0."""
    import torch

    from consumers.offline.encoding import pad

    device = causal_lm.device
    tokens, own = (each.to(device) for each in pad(rows, 0))
    divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)[:, None]
    with torch.no_grad():
        logits = causal_lm(input_ids=tokens, attention_mask=own, use_cache=False).logits[:, :-1].float()
        logits /= divisors[:, :, None]
        chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)
    values = torch.nn.functional.pad(chosen, (1, 0)).clamp(max=0.0).cpu().numpy()
    return [found[: len(row)] for found, row in zip(values, rows, strict=True)]


def _check_self(system: str | None = None, template: str | None = None) -> None:
    if not system and not template:
        raise ValueError("it needs system or template: without them the policy would be its own teacher unchanged")


@reward(inline=True, check=_check_self, settings=True, teacher=True)
def teacher_self(
    completion: str,
    *,
    self_logprobs: Array | None,
    self_problem: str,
    system: str | None = None,
    template: str | None = None,
) -> npt.NDArray[np.float32]:
    """Return log-probabilities by the policy itself, at the sample's newest version, after another prompt.

    The generator has computed them when the sample ended (producers/workflows/self_teacher.py says from what).
    """
    if self_logprobs is None:
        raise ValueError(self_problem or "the generator gave no log-probabilities after the other prompt")
    return self_logprobs.numpy()


@server(check=lambda base_url, **_: check_url("base_url", base_url), concurrency=64, teacher=True)
async def teacher_server(
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    base_url: str,
    model: str,
    segments: list[Segment],
    api_key_env: str | None = None,
) -> npt.NDArray[np.float32]:
    """Return log-probabilities by an inference server, such as vLLM or SGLang: OpenAI's completions with ``echo``.

    ``base_url`` ends in /v1; ``model`` is the name that the model is served by.
    """
    ids = np.array(prompt_ids + completion_ids, dtype=np.int64)
    found = np.zeros(len(ids), dtype=np.float32)
    url = base_url.rstrip("/") + "/completions"
    for row in rows_of(segments, len(ids)):
        body = echo_request(model, ids[row.places].tolist())
        values = echoed_logprobs(url, await post_json(url, body, key_headers(api_key_env), repeatable=True), row.places)
        found[row.places[row.shared :]] = values[row.shared :]
    return found


def echo_request(model: str, ids: Sequence[int]) -> dict[str, Any]:
    """Return the request for the text and the log-probabilities of tokens; servers want to sample one more."""
    return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}


def echoed_logprobs(url: str, answer: Any, tokens: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Return the log-probability of each of the tokens of a request, that of the first being 0.

    ValueError if the answer is of another kind.
    """
    try:
        said = answer["choices"][0]["logprobs"]["token_logprobs"][: len(tokens)]
        values = np.array([0.0, *said[1:]], dtype=np.float32)
    except (TypeError, KeyError, IndexError, ValueError):
        values = np.zeros(0, dtype=np.float32)
    if len(values) != len(tokens) or not math.isfinite(values.sum(dtype=np.float64)):
        raise ValueError(
            f"{url} answers {json.dumps(answer)[:80]}, must have the log-probabilities of the {len(tokens)} tokens that"
            " it was sent (echo with logprobs)"
        )
    return np.minimum(values, 0.0)
