"""What generator.exact refuses, each in one line."""

from typing import Any

import pytest

from schemas.config import parse_config
from schemas.errors import ConfigError
from tests.support.configurations import SECTIONS

GENERATOR = {"engine": "transformers", "exact": True, "update": "recompute"}


def sections(**changed: Any) -> dict[str, Any]:
    return {**SECTIONS, "model": {"path": "m", "dtype": "float32"}, "generator": GENERATOR, **changed}


def test_the_trainer_follows_the_engine() -> None:
    assert parse_config(sections()).exact
    assert parse_config(sections(generator={**GENERATOR, "update": "drain"})).exact
    assert not parse_config(SECTIONS).exact
    assert not parse_config(sections(generator={**GENERATOR, "engine": "vllm"})).exact


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"generator": {**GENERATOR, "engine": "scripted"}}, "must be transformers or vllm, is 'scripted'"),
        ({"generator": {**GENERATOR, "engine": "auto"}}, "must be transformers or vllm, is 'auto'"),
        (
            {"generator": {**GENERATOR, "update": "keep"}},
            "generator.update keep leaves keys and values of older weights",
        ),
        ({"model": {"path": "m", "dtype": "bfloat16"}}, "does not support model.dtype bfloat16"),
        ({"trainer": {"lora": {"rank": 4}}}, "does not support trainer.lora"),
        ({"trainer": {"compile": True}}, "does not support trainer.compile"),
        ({"trainer": {"router_replay": True}}, "does not support trainer.router_replay"),
        ({"trainer": {"parallel": {"tensor": 2}}}, "does not support trainer.parallel.tensor 2"),
        ({"trainer": {"parallel": {"context": 2}}}, "does not support trainer.parallel.context 2"),
        ({"pools": {"a": {"generator": {"engine": "vllm"}}}}, "pools.a.generator.engine must be that of the section"),
        ({"pools": {"a": {"generator": {"exact": False}}}}, "pools.a.generator.exact must be the same for all"),
    ],
)
def test_what_has_no_fixed_order_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(sections(**changed))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
