"""Pools: a pool's generators have the settings of ``generator`` with those of the pool in their place."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import by_pool, dump_config, load_config, of_pool, parse_config
from schemas.errors import ConfigError

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}]},
    "generator": {"engine": "scripted", "args": {"tokens": 5}, "max_samples": 32, "replicas": 3},
}


def test_a_configuration_without_pools_has_the_one_kind_of_generators_that_it_had() -> None:
    config = parse_config(BASE)
    assert by_pool(config) == {"": config}
    assert of_pool(config, None) is config
    assert config.pool == ""


def test_a_pool_keeps_what_it_does_not_change_and_loses_the_arguments_of_another_engine() -> None:
    pools = {
        "fast": {"generator": {"max_samples": 256, "args": {"max_length": 3}}},
        "real": {"generator": {"engine": "transformers", "replicas": 1}},
    }
    config = parse_config({**BASE, "pools": pools})
    fast, real = by_pool(config).values()
    assert (fast.pool, fast.generator.engine, fast.generator.replicas) == ("fast", "scripted", 3)
    assert (fast.generator.args, fast.generator.max_samples) == ({"tokens": 5, "max_length": 3}, 256)
    assert (real.generator.engine, real.generator.args, real.generator.max_samples) == ("transformers", {}, 32)
    assert dump_config(fast) | {"generator": 0} == {k: v for k, v in dump_config(config).items() if k != "pools"} | {
        "generator": 0
    }
    assert parse_config(dump_config(config)).pools == config.pools


def test_a_pool_has_a_generator_for_each_unit() -> None:
    pools = {"arms": {"units": [{"ROBOT": "a"}, {"ROBOT": "b"}]}, "one": {"generator": {"replicas": 1}}}
    assert [one.generator.replicas for one in by_pool(parse_config({**BASE, "pools": pools})).values()] == [2, 1]


@given(st.fixed_dictionaries({}, optional={"max_samples": st.integers(1, 9), "replicas": st.integers(0, 9)}))
def test_a_pool_is_what_the_section_would_be_with_its_settings(own: dict[str, Any]) -> None:
    changed = parse_config({**BASE, "generator": {**BASE["generator"], **own}})
    pool = of_pool(parse_config({**BASE, "pools": {"a": {"generator": own}}}), "a")
    assert pool.generator == changed.generator


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"generator": {"max_sample": 2}}, "pools.a: generator.max_sample: unknown key, did you mean 'max_samples'?"),
        ({"generator": {"max_samples": 0}}, "pools.a: generator.max_samples: 0 is not allowed, must be greater than"),
        ({"generator": 3}, "pools.a.generator: 3 is not allowed, must be a mapping"),
        ({"model": {"path": "x"}}, "pools.a.model: unknown key"),
        ({"generators": {}}, "pools.a.generators: unknown key, did you mean 'generator'?"),
        (
            {"generator": {"workflow": {"name": "tools"}}},
            "pools.a.generator.workflow must be the same for all generators",
        ),
        ({"generator": {"lease_s": 1}}, "pools.a.generator.lease_s must be the same"),
        ({"generator": {"args": {"tokenizer": "x"}}}, "pools.a.generator.args.tokenizer must be the same"),
        ({"generator": {"agents": {"history": "template"}}}, "pools.a.generator.agents.history must be the same"),
        ({"generator": {"engine": "http"}}, "pools.a: generator.engine http requires generator.http"),
        ({"env": {"A": 1}}, "pools.a.env.A: 1 is not allowed, must be a text"),
        ({"env": {"TIDEMILL_RUN__SEED": "1"}}, "pools.NAME.env or units: 'TIDEMILL_RUN__SEED' is not allowed"),
        ({"units": [{}]}, "pools.a.units must each have the same environment variables, one or more"),
        ({"units": [{"A": "1"}, {"B": "2"}]}, "pools.a.units must each have the same environment variables"),
        ({"units": [{"A": "1"}, {"A": "1"}]}, "pools.a.units must differ: two are equal"),
        ({"units": [{"A": "1"}], "env": {"A": "2"}}, "pools.a.units and env both have A: remove one of them"),
        (
            {"units": [{"A": "1"}], "generator": {"replicas": 2}},
            "pools.a.generator.replicas 2 must be at most 1, one for each of pools.a.units",
        ),
        ({"slurm": {"--qos": "low"}}, "pools.NAME.slurm: '--qos' is not allowed, must be the name of a long option"),
        ({"slurm": {"array": "0-9"}}, "pools.NAME.slurm: 'array' is not allowed, must be the name of a long option"),
        ({"slurm": {"qos": "a\n#SBATCH --exclusive"}}, "pools.NAME.slurm: 'a\\n#SBATCH --exclusive' is not allowed"),
        ({"ray": {"l40s": 0}}, "pools.a.ray.l40s: 0 is not allowed, must be greater than 0"),
        ([], "pools.a: [] is not allowed, must be a section with keys such as generator, nodes, env, python"),
    ],
)
def test_what_a_pool_cannot_have_is_refused_in_a_line(pool: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({**BASE, "pools": {"a": pool}})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["A", "a.b", "1", "a" * 33, ""])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a name of up to 32 lower-case letters, digits and hyphens"):
        parse_config({**BASE, "pools": {name: {}}})


def test_two_pools_of_one_name_are_refused_and_one_setting_is_changed_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\npools: {a: {}}\n")
    config = load_config(file, ["pools.a.generator.max_samples=7"], {"TIDEMILL_POOLS__A__PYTHON": "/opt/python"})
    assert of_pool(config, "a").generator.max_samples == 7
    assert config.pools["a"].python == Path("/opt/python")
    for name, message in (("b", "'b' is not one of pools, which are a"), (None, "name one of pools: a")):
        with pytest.raises(ConfigError, match=message):
            of_pool(config, name)
    file.write_text(file.read_text().replace("a: {}", "a: {}, a: {}"))
    with pytest.raises(ConfigError, match="the key 'a' is given twice"):
        load_config(file)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"engine": "http", "http": {"dialect": "vllm"}}, "generator.http.dialect vllm can't use"),
        ({"engine": "http", "http": {"dialect": "sglang", "url": "http://a:1"}}, "generator.http.url can't use"),
        ({"engine": "mlp"}, "generator.engine mlp can't use"),
    ],
)
def test_who_cannot_give_its_gpus_takes_no_turns(generator: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**BASE, "generator": generator, "placement": {"trainer": "0", "generator": "0"}})
    pools = {"a": {"generator": {"replicas": 1, **generator}}}
    with pytest.raises(ConfigError, match=f"pools.a: .*{message}"):
        parse_config({**BASE, "pools": pools, "placement": {"trainer": "0", "generator": "0"}})


def test_auto_plans_no_pools_of_other_machines() -> None:
    message = "placement auto plans the machine of `tidemill up`: remove it, or pools.a.nodes"
    with pytest.raises(ConfigError, match=message):
        parse_config({**BASE, "pools": {"a": {"nodes": ["m"]}}, "placement": "auto"})
