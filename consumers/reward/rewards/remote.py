"""Rewards that servers give: a scorer of the user's own, and a reward model that vLLM serves."""

import json
import numbers
from typing import Annotated, Any

from pydantic import Field

from consumers.reward.rewards.http import check_url, key_headers, post_json, server


@server(check=lambda url, **_: check_url("url", url), concurrency=16)
async def remote(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    url: str,
    trajectory_id: str,
    reward: float | None,
    metrics: dict[str, float],
    finish: str,
    api_key_env: str | None = None,
    idempotent: bool = False,
    ids: bool = False,
    **data: Any,
) -> float:
    """Return the reward of your own server, which gets the sample as JSON and answers {"reward": 0.5}.

    The header Idempotency-Key names the sample, in whichever attempt. A request that the server may have begun is
    repeated only with ``idempotent``, for a scorer that gives the same answer, or has an effect once, for the same key.
    ``ids`` sends the token ids, too. A field of the data that has the name of one of these arguments is not sent.
    """
    body: dict[str, Any] = {
        "id": trajectory_id,
        "prompt": prompt,
        "completion": completion,
        "data": data,
        "reward": reward,
        "metrics": metrics,
        "finish": finish,
    }
    if ids:
        body |= {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    headers = {**key_headers(api_key_env), "Idempotency-Key": trajectory_id}
    answer = await post_json(url, body, headers, repeatable=idempotent)
    if isinstance(answer, dict) and answer.get("error"):
        raise ValueError(f"{url} says: {str(answer['error'])[:200]}")
    value = answer.get("reward") if isinstance(answer, dict) else answer
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f'{url} answers {json.dumps(answer)[:80]}, must be a number or {{"reward": a number}}')
    return float(value)


@server(check=lambda base_url, **_: check_url("base_url", base_url), concurrency=64)
async def reward_model_server(
    completion: str,
    *,
    base_url: str,
    row_ids: list[int],
    model: str | None = None,
    api_key_env: str | None = None,
    eos_id: Annotated[int, Field(ge=0)] | None = None,
) -> float:
    """Return the score of a reward model served by `vllm serve PATH --runner pooling`, a classifier with one label.

    It gets the policy's token ids, so it needs the policy's tokenizer. ``base_url`` is the server's address without a
    path, ``model`` the name it is served by, if there are several. With ``eos_id`` each sequence ends in this token,
    also one that was cut, as those do that `tidemill reward-model` trains on.
    """
    url = base_url.rstrip("/") + "/classify"
    if eos_id is not None and row_ids[-1:] != [eos_id]:
        row_ids = [*row_ids, eos_id]
    # The raw score, as in training, without the function that makes probabilities of it.
    body: dict[str, Any] = {"input": row_ids, "use_activation": False}
    if model is not None:
        body["model"] = model
    answer = await post_json(url, body, key_headers(api_key_env), repeatable=True)
    try:
        (score,) = answer["data"][0]["probs"]
    except (TypeError, KeyError, IndexError, ValueError):
        raise ValueError(
            f"{url} answers {json.dumps(answer)[:80]}, must be the score of a model with one label"
        ) from None
    return float(score)
