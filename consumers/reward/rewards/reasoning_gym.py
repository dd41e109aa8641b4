"""Scores of reasoning-gym: the problem is made again from its recipe, and its own task judges the answer.

Making it again, with the hash seed fixed, keeps what MessagePack would not: tuples, sets and the
task's own objects. A digest makes sure that it is the same problem.
"""

import hashlib
import json
from functools import lru_cache
from typing import Any

from consumers.reward.rewards.terms import reward

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError)
"""Errors that the scorers of boxnet, coin_flip, game_of_life and prime_factorization raise on a malformed answer.

The problem itself is known to be sound by then, so the answer is at fault: an ordinary wrong one."""


@reward(needs=("reasoning_gym", "reward"))
def reasoning_gym(completion: str, *, reasoning_gym: dict[str, Any], require_tags: bool = False) -> float:
    """Return the score, 0 to 1, that the task of reasoning-gym itself gives.

    The answer stands in the last ``<answer>…</answer>``; without one, the whole completion is the answer, or nothing is
    with ``require_tags``. ``reasoning_gym`` comes with the dataset of that name. ValueError if the problem cannot be
    made again.
    """
    from reasoning_gym.utils import extract_answer

    recipe = reasoning_gym
    dataset, entry = _problem(json.dumps({**recipe, "digest": None}, sort_keys=True))
    found = hashlib.blake2b(repr((entry["question"], entry["answer"])).encode(), digest_size=8).hexdigest()
    if found != recipe["digest"]:
        raise ValueError(
            f"task {recipe['task']!r} number {recipe['index']} is another problem here:"
            " the same version of reasoning-gym and of Python must run everywhere"
        )
    answer = extract_answer(completion)
    if answer is None and not require_tags:
        answer = completion.strip()
    try:
        return float(dataset.score_answer(answer, entry))
    except _UNREADABLE:
        return 0.0


@lru_cache(maxsize=256)
def _problem(recipe_json: str) -> tuple[Any, dict[str, Any]]:
    recipe = json.loads(recipe_json)
    index = recipe.pop("index")
    dataset = _dataset(json.dumps(recipe, sort_keys=True))
    return dataset, dataset[index]


@lru_cache(maxsize=16)
def _dataset(recipe_json: str) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    recipe = json.loads(recipe_json)
    params = recipe["params"]
    if recipe["task"] == "composite":
        params["datasets"] = [DatasetSpec(**spec) for spec in params["datasets"]]
    return reasoning_gym.create_dataset(recipe["task"], size=recipe["size"], seed=recipe["seed"], **params)
