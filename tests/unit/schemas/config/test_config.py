"""Configuration mistakes are one line that names field, value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.supervisor.process import MARK
from schemas.config import dump_config, load_config, parse_config, save_config
from schemas.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "jsonl"},
    "reward": {"terms": [{"name": "exact"}]},
}


def merged(**sections: Any) -> dict[str, Any]:
    return {**MINIMAL, **sections}


def http(**server: Any) -> dict[str, Any]:
    return {"engine": "http", "http": {"dialect": "sglang", **server}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (merged(trainer={"stepz": 3}), "trainer.stepz: unknown key, did you mean 'steps'?"),
        (merged(tariner={}), "tariner: unknown key, did you mean 'trainer'?"),
        (merged(trainer={"steps": 0}), "trainer.steps: 0 is not allowed, must be greater than or equal to 1"),
        (merged(trainer={"steps": True}), "trainer.steps: True is not allowed, must be a number"),
        (merged(trainer={"optimizer": {"lr": True}}), "trainer.optimizer.lr: True is not allowed, must be a number"),
        (merged(trainer={"profile_steps": [True]}), "trainer.profile_steps: [True] is not allowed, must be numbers"),
        (merged(model={"path": "m", "dtype": "fp8"}), "model.dtype: 'fp8' is not allowed"),
        ({"model": {"path": "m"}}, "train: required and missing; reward: required and missing"),
        (merged(reward={}), "reward.terms: required and missing"),
        (merged(reward={"terms": []}), "reward.terms: [] is not allowed, must be a list of 1 or more"),
        (merged(trainer={"lr": 1}), "trainer.lr: unknown key, did you mean 'trainer.optimizer.lr'?"),
        (merged(staleness=1), "staleness: unknown key, did you mean 'flow.staleness'?"),
        (merged(trainer=3), "trainer: 3 is not allowed, must be a section with keys such as steps, batch_groups"),
        (merged(train="a.jsonl"), "train: 'a.jsonl' is not allowed, must be a section, or a list of them, with keys"),
        (merged(reward={"terms": "exact"}), "must be a list of sections with keys such as name, weight"),
        (merged(run={"name": 7}), "run.name: 7 is not allowed, must be a text, in quotes"),
        (merged(run={"folder": []}), "run.folder: [] is not allowed, must be a path"),
        (
            merged(train={"name": "jsonl", "label": "a b"}),
            "train.label: 'a b' is not allowed, must be a text of the form",
        ),
        (merged(generator={"args": 1}), "generator.args: 1 is not allowed, must be a mapping"),
        (merged(trainer={"profile_steps": [-1]}), "trainer.profile_steps.0: -1 is not allowed, must be greater than"),
        (
            merged(trainer={"activation_checkpointing": "yes please"}),
            "trainer.activation_checkpointing: 'yes please' is not allowed, must be 'auto' or 'selective'",
        ),
        (
            merged(control={"trusted_proxies": ["x"]}),
            "control.trusted_proxies.0: 'x' is not allowed, must be a valid IP",
        ),
        (
            merged(trainer={"advantage": {"mean_between": [1, 0]}}),
            "trainer.advantage.mean_between must be a smaller and a larger number",
        ),
        (
            merged(model={"path": "m", "max_pixels": 9000}),
            "model.max_pixels applies to images only: set model.kind to vision",
        ),
        (
            merged(model={"path": "m", "kind": "vision", "freeze_vision": False}, trainer={"lora": {}}),
            "trainer.lora with model.freeze_vision false is not supported with model.kind vision: remove it",
        ),
        (
            merged(model={"path": "m", "kind": "vision"}, trainer={"router_replay": True}),
            "trainer.router_replay is not supported with model.kind vision: remove it",
        ),
        (
            merged(model={"path": "m", "kind": "vision"}, generator={"engine": "transformers"}),
            "generator.engine transformers is not supported with model.kind vision",
        ),
        (
            merged(model={"path": "m", "kind": "vision"}, generator={"engine": "http", "http": {"dialect": "sglang"}}),
            "generator.engine http is not supported with model.kind vision",
        ),
        (
            merged(model={"path": "m", "output_tokens": "<a.>"}, trainer={"parallel": {"tensor": 2}}),
            "trainer.parallel.tensor 2 is not supported with model.output_tokens: remove it",
        ),
        (
            merged(
                model={"path": "m", "output_tokens": "<a.>"}, generator={"engine": "http", "http": {"dialect": "vllm"}}
            ),
            "generator.engine http is not supported with model.output_tokens",
        ),
        (merged(reward=None, generator={"workflow": {"name": "mine.py:Own"}}), "reward: None is not allowed"),
        (merged(sampling={"n": 1}), "sampling.n is 1: set sampling.n to 2 or more"),
        (merged(sampling={"min_p": 0.1}), "sampling.min_p is not supported: it changes the sampled distribution"),
        (merged(sampling={"repetition_penalty": 1.1}), "sampling.repetition_penalty is not supported"),
        (merged(sampling={"temperature": 0.0}), "sampling.temperature is 0, which makes all samples of a group equal"),
        (merged(sampling={"max_tokens": 4096}), "leaves no room for a prompt in model.max_length 2048"),
        (merged(flow={"staleness": 0, "window": 9}), "the window may be at most 1"),
        (
            merged(run={"name": "MyRun"}),
            "run.name: 'MyRun' is not allowed, must be at most 63 lower-case letters, digits, -",
        ),
        (merged(broker={"prefix": "a b"}), "broker.prefix: 'a b' is not allowed, must be letters, digits, - _ and ."),
        (merged(generator={"lease_s": float("inf")}), "generator.lease_s: inf is not allowed, must be a finite number"),
        (merged(trainer={"optimizer": {"lr": float("inf")}}), "trainer.optimizer.lr: inf is not allowed"),
        (merged(sampling={"temperature": float("inf")}), "sampling.temperature: inf is not allowed"),
        (merged(reward={"terms": [{"name": "exact", "weight": float("nan")}]}), "reward.terms.0.weight: nan is not"),
        (merged(trainer={"loss": {"entropy_coef": float("nan")}}), "trainer.loss.entropy_coef: nan is not allowed"),
        (
            merged(trainer={"optimizer": {"betas": [5, -3]}}),
            "trainer.optimizer.betas.0: 5 is not allowed, must be",
        ),
        (
            merged(reward={"terms": [{"name": "exact"}], "env": ["KEY", "REDIS_URL_FILE"]}),
            "reward.env: REDIS_URL_FILE is a variable of the services, which users' code must not see",
        ),
        (merged(generator={"agents": {"env": ["TIDEMILL_CONTROL_TOKEN"]}}), "generator.agents.env: TIDEMILL_CONTROL"),
        (merged(reward={"terms": [{"name": "exact"}], "env": ["A B"]}), "reward.env: 'A B' is not the name of an env"),
        (merged(trainer={"optimizer": {"betas": [0.9, -3]}}), "trainer.optimizer.betas.1: -3 is not allowed, must be"),
        (merged(generator={"engine": "http"}), "generator.engine http requires generator.http with a dialect"),
        (
            merged(generator={"http": {"dialect": "vllm"}}),
            "generator.http requires generator.engine http, which is 'auto'",
        ),
        (merged(generator={"engine": "http", "http": {"dialect": "tgi"}}), "generator.http.dialect: 'tgi' is not"),
        (merged(generator=http(url="10.0.0.7")), "generator.http.url '10.0.0.7' must begin with http://"),
        (merged(generator=http(url="http://a", command=["b"])), "set only one of them"),
        (
            merged(generator={**http(url="http://a"), "args": {"tp": 2}}),
            "generator.args tp: options of a server",
        ),
        (merged(generator={**http(url="http://a"), "replicas": 2}), "the server at generator.http.url can serve one"),
        (merged(generator=http(dialect="openai")), "generator.http.dialect openai requires a running server"),
        (merged(generator=http(), trainer={"lora": {"rank": 8}}), "trainer.lora: the engine http loads whole models"),
    ],
)
def test_a_mistake_is_one_clear_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_long_value_is_shown_in_part_and_without_its_password() -> None:
    url = "redis://me:secret@host:6379/0?" + "x" * 500
    with pytest.raises(ConfigError) as error:
        parse_config(merged(broker={"url": [url]}))
    assert "secret" not in str(error.value)
    assert len(str(error.value)) < 250


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(merged(trainer={"steps": 1, "batch_groups": 1})))
    environment = {"TIDEMILL_TRAINER__STEPS": "2", "TIDEMILL_TRAINER__BATCH_GROUPS": "2", "TIDEMILL_HOME": "x"}
    config = load_config(file, ["trainer.batch_groups=3", "reward.terms.0.weight=0.5"], environment)
    assert (config.trainer.steps, config.trainer.batch_groups, config.reward.terms[0].weight) == (2, 3, 0.5)
    assert config.base == tmp_path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.steps"], "must look like trainer.steps=100"),
        (["model.path.x=1"], "which is not a section"),
        (["reward.terms.7.weight=1"], "'7' is not an index below 1"),
        (["trainer.steps=[1"], "is not a YAML value"),
    ],
)
def test_wrong_overrides_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        load_config(file, overrides, {})
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_not_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "none.yaml", [], {})
    with pytest.raises(
        ConfigError,
        match=r"cannot read the configuration .*: Is a directory, give the file in it, such as .*config\.yaml",
    ):
        load_config(tmp_path, [], {})
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "bad.yaml", [], {})


def test_a_key_that_is_given_twice_is_refused_and_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL) + "trainer: {steps: 7}\ntrainer: {batch_groups: 9}\n")
    with pytest.raises(ConfigError, match=r"^[^\n]*the key 'trainer' is given twice[^\n]* line 9$"):
        load_config(file, [], {})
    anchors = "sampling: &a {n: 4}\neval: {dataset: {name: x}, sampling: {<<: *a, n: 1}}\n"
    file.write_text(yaml.safe_dump(MINIMAL) + anchors)
    evaluation = load_config(file, [], {}).eval
    assert evaluation is not None
    assert evaluation.sampling.n == 1
    with pytest.raises(ConfigError, match=r"^trainer: the key 'steps' is given twice"):
        load_config(file, ["trainer={steps: 1, steps: 2}"], {})


def test_a_file_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes("model: {path: Müller}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^the configuration [^\n]* is not UTF-8: [^\n]* at byte 15$"):
        load_config(file, [], {})


@pytest.mark.parametrize("variable", ["TIDEMILL_TRAINER_STEPS", "TIDEMILL_TRAINER_STEP", "TIDEMILL_RUN_NAME"])
def test_a_variable_with_one_underscore_between_section_and_key_is_not_ignored(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError, match=rf"^the variable {variable} sets nothing: .* TIDEMILL_[A-Z]+__[A-Z]+\?$"):
        load_config(file, [], {variable: "7"})


def test_variables_that_are_no_settings_are_left_alone(tmp_path: Path) -> None:
    """Those of the control plane's clients, of other programs, and what Kubernetes sets for a service of that name."""
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    others = {
        "TIDEMILL_CONTROL_TOKEN_FILE": "token",
        "TIDEMILL_CONTROL_TOKEN": "x",
        "TIDEMILL_CONTROL_URL": "http://a",
        MARK: "what `tidemill up` gives its services",
        "TIDEMILL_HOME": "x",
        "TIDEMILL_CONTROL_PORT": "tcp://10.0.0.7:8642",
    }
    assert load_config(file, [], others).control.port == 8642


def test_slots_follow_the_staleness_bound_and_the_window() -> None:
    config = parse_config(merged(flow={"staleness": 4, "window": 3}, trainer={"batch_groups": 8}))
    assert config.slots == 5 * 8 - 2


def test_zero_variance_groups_are_dropped_only_where_advantages_compare() -> None:
    centered = parse_config(merged()).trainer.advantage
    raw = parse_config(merged(trainer={"advantage": {"name": "raw"}})).trainer.advantage
    kept = parse_config(merged(trainer={"advantage": {"keep_zero_variance": True}})).trainer.advantage
    assert (centered.drops_zero_variance, raw.drops_zero_variance, kept.drops_zero_variance) == (True, False, False)


def test_turns_keep_groups_of_one_reward_which_they_may_tell_apart_and_need_a_group() -> None:
    turns = parse_config(merged(trainer={"advantage": {"name": "turns"}})).trainer.advantage
    asked = parse_config(merged(trainer={"advantage": {"name": "turns", "keep_zero_variance": False}}))
    assert (turns.drops_zero_variance, asked.trainer.advantage.drops_zero_variance) == (False, True)
    with pytest.raises(ConfigError, match=r"sampling\.n is 1"):
        parse_config(merged(trainer={"advantage": {"name": "turns"}}, sampling={"n": 1}))


@pytest.mark.parametrize("name", ["raw", "reinforce_pp", "gae"])
def test_by_name_is_refused_where_nothing_is_compared(name: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.advantage.by_name requires an advantage .*: {name} does not"):
        parse_config(merged(trainer={"advantage": {"name": name, "by_name": True}}))


def test_what_is_in_effect_is_saved_and_means_the_same_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source" / "mine.yaml"
    source.parent.mkdir()
    source.write_text(yaml.safe_dump(MINIMAL))
    config = load_config(source, ["trainer.steps=7"], {"TIDEMILL_FLOW__STALENESS": "3"})
    saved = tmp_path / "run" / "config.yaml"
    saved.parent.mkdir()
    save_config(config, saved)
    again = load_config(saved, environment={})
    assert again.base == config.base == source.parent
    assert (again.trainer.steps, again.flow.staleness) == (7, 3)
    assert again.model_copy(update={"run": config.run}) == config
    assert saved.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_a_switch_may_be_written_as_yaml_reads_it(tmp_path: Path, word: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    assert load_config(file, [f"trainer.publish.delta={word}"], {}).trainer.publish.delta == word


def test_a_filter_by_a_term_that_the_reward_does_not_have_is_refused() -> None:
    data: dict[str, Any] = {
        "model": {"path": "m"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}, {"name": "length"}]},
        "trainer": {"advantage": {"filter_term": "exakt"}},
    }
    with pytest.raises(
        ConfigError, match=r"filter_term 'exakt' is not a term of reward.terms, must be one of exact, length"
    ):
        parse_config(data)


def test_agents_whose_episodes_may_outlast_the_trainers_patience_are_refused() -> None:
    agents = {"workflow": {"name": "agent", "args": {"run": "mine.py:run"}}}
    parse_config(merged(generator=agents))
    with pytest.raises(ConfigError, match=r"generator.agents.deadline_s 700 must be below trainer.batch_timeout_s 600"):
        parse_config(merged(generator={**agents, "agents": {"deadline_s": 700}}))
    with pytest.raises(ConfigError, match=r"set generator.agents.deadline_s 300 to 60 or less"):
        parse_config(merged(generator={**agents, "update": "drain"}))


def test_a_grace_of_episodes_that_leaves_no_time_to_hand_them_over_is_refused() -> None:
    agents = {"workflow": {"name": "agent", "args": {"run": "mine.py:run"}}, "agents": {"grace_s": 15}}
    parse_config(merged(generator=agents))
    agents["agents"] = {"grace_s": 16}
    with pytest.raises(ConfigError, match=r"grace_s 16 and 5 s to hand episodes over exceed .*supervisor.grace_s 20"):
        parse_config(merged(generator=agents))
    parse_config(merged(generator=agents, supervisor={"grace_s": 21}))


@pytest.mark.parametrize("reward", [{}, {"reward": None}, {"reward": {}}, {"reward": {"terms": []}}])
def test_without_a_term_an_agents_own_reward_counts(reward: dict[str, Any]) -> None:
    data = {"model": {"path": "m"}, "train": {"name": "jsonl"}, "generator": {"workflow": {"name": "agent"}}}
    config = parse_config(data | reward)
    assert [term.name for term in config.reward.terms] == ["episode"]
    assert dump_config(config)["reward"]["terms"] == [{"name": "episode"}], "it is written down for other processes"


def test_terms_that_are_named_replace_or_join_that_of_the_episode() -> None:
    for names in (["format"], ["episode", "format"]):
        terms = [{"name": name} for name in names]
        config = parse_config(merged(generator={"workflow": {"name": "environment"}}, reward={"terms": terms}))
        assert [term.name for term in config.reward.terms] == names


@pytest.mark.parametrize("where", ["reward", "eval"])
@pytest.mark.parametrize("workflow", ["single_turn", "tools"])
def test_the_reward_of_a_workflow_that_gives_none_is_refused(where: str, workflow: str) -> None:
    sections: dict[str, Any] = {"eval": {"dataset": {"name": "jsonl"}}} if where == "eval" else {}
    sections[where] = {**sections.get(where, {}), "terms": [{"name": "episode"}]}
    sections["generator"] = {"workflow": {"name": workflow}}
    with pytest.raises(ConfigError, match=rf"{where}.terms name episode, .* the workflow {workflow} gives no reward"):
        parse_config(merged(**sections))


def test_with_tools_a_reward_term_has_to_be_named() -> None:
    data = {"model": {"path": "m"}, "train": {"name": "jsonl"}, "generator": {"workflow": {"name": "tools"}}}
    with pytest.raises(ConfigError, match="reward"):
        parse_config(data)


@pytest.mark.parametrize("written", ["3e-4", "1E5", "+2.5e3", ".5e-3", "-1.0e5"])
def test_a_number_with_an_exponent_is_a_number_wherever_it_stands(tmp_path: Path, written: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL) + f"trainer: {{loss: {{name: gspo, args: {{clip_low: {written}}}}}}}\n")
    config = load_config(file, [f"trainer.loss.args.clip_high={written}"], {})
    assert config.trainer.loss.args == {"clip_low": float(written), "clip_high": float(written)}


def test_a_text_that_looks_like_a_number_stays_a_text_for_the_services(tmp_path: Path) -> None:
    texts = {"revision": "7e10", "other": "1e-3", "version": "1.5"}
    config = parse_config(merged(train={"name": "hf", "args": texts}), base=tmp_path)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", [], {}).train[0].args == texts


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = parse_config(
        merged(
            model={"path": "~/models/m"},
            run={"folder": "~/runs/a"},
            trainer={"publish": {"folder": "~/weights"}, "kl": {"model": "~/models/reference"}},
            generator={"agents": {"python": "~/agents/bin/python"}},
            control={"token_file": "~/token"},
        )
    )
    assert config.model.path == "/home/ada/models/m"
    assert config.folder == Path("/home/ada/runs/a")
    assert config.trainer.publish.folder == Path("/home/ada/weights")
    assert config.trainer.kl.model == "/home/ada/models/reference"
    assert config.generator.agents.python == Path("/home/ada/agents/bin/python")
    assert config.control.token_file == Path("/home/ada/token")
