"""The recipes of docs/recipes: each file is one that a run accepts, and the search agent searches and is rewarded."""

import inspect
import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
import yaml

from consumers.reward.scorer import Scorer
from deploy.checks.names import check_names
from producers.datasets import DATASETS
from producers.datasets.loading import build_dataset
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import load_config
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, chat_tokenizer, play
from tests.support.user_code.docs_code import ROOT, write_code

YAML = re.compile(r'^```yaml title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PAGES = sorted((ROOT / "docs/recipes").glob("*.md"))
FILES = {title: text for page in PAGES for title, text in YAML.findall(page.read_text(encoding="utf-8"))}
SEARCH = ROOT / "examples/search/config.yaml"
ARGUMENTS = {"query": "deepest lake Baikal outflow", "passages": 2}
CALL = f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': ARGUMENTS})}\n</tool_call>"


@pytest.mark.parametrize("title", FILES)
def test_the_file_of_a_recipe_is_accepted_and_its_page_names_it(title: str, tmp_path: Path) -> None:
    write_code(ROOT / "docs/bring-your-own/environments.md", tmp_path)
    (tmp_path / title).write_text(FILES[title], encoding="utf-8")
    config = load_config(tmp_path / title, (), {})
    check_names(config)
    for dataset in config.train:
        taken = inspect.signature(DATASETS.get(dataset.name, config.base)).parameters.keys() - {"base"}
        assert dataset.args.keys() <= taken, f"arguments of the dataset {dataset.name}"
    assert config.run.name == title.removesuffix(".yaml")
    (page,) = [text for page in PAGES if f'title="{title}"' in (text := page.read_text(encoding="utf-8"))]
    assert f"    tidemill up {title}" in page


def test_the_task_of_skypilot_has_its_keys_installs_what_there_is_and_runs_from_its_bucket() -> None:
    page = (ROOT / "docs/recipes/skypilot.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    task = yaml.safe_load(text)
    assert set(task) == {"resources", "workdir", "file_mounts", "setup", "run"}, "keys of SkyPilot's tasks"
    (extras,) = re.findall(r"^pip install 'tidemill\[(.*)\]'$", task["setup"].strip())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (mount,) = task["file_mounts"]
    (folder,) = re.findall(r"run\.folder=(\S+)", task["run"])
    assert folder.startswith(f"{mount}/")


def test_every_recipe_says_what_you_have_and_want_and_is_listed() -> None:
    index = (ROOT / "docs/recipes/index.md").read_text(encoding="utf-8")
    recipes = [page for page in PAGES if page.name != "index.md"]
    assert len(recipes) == 10
    for page in recipes:
        text = page.read_text(encoding="utf-8")
        assert all(f"**{words}**" in text for words in ("You have", "You want", "Watch")), page.name
        assert f"({page.name})" in index


@pytest.mark.parametrize(("said", "reward"), [("the Kara sea.", 1.0), ("Baltic Sea", 0.0)])
async def test_the_search_agent_reads_passages_and_is_scored(tmp_path: Path, said: str, reward: float) -> None:
    pytest.importorskip("mcp")
    config = load_config(SEARCH, ["generator.engine=scripted"], {})
    example = build_dataset(config.train[0].at_levels()[0], config.base)[0]
    tokenizer = chat_tokenizer(tmp_path)
    engine = SpeakingEngine(
        tokenizer, lambda prompt: f"<answer>{said}</answer>" if "Angara" in prompt else f"I look it up. {CALL}"
    )
    task = msgspec.structs.replace(chat_task("Which sea?"), data=dict(example.data))
    (sample,) = await play(config, engine, tokenizer, task)
    assert isinstance(sample, SampledCompletion)
    trained = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert "only outflow is the river Angara" in tokenizer.decode_all(sample.tokens)
    assert "Angara" not in tokenizer.decode_all(trained), "passages are read, not trained"
    async with Scorer(config.reward.model_copy(update={"workers": 1, "timeout_s": 30.0}), config.base) as scorer:
        (score,) = await scorer.score_all([sample.to_trajectory(task, "docs", "g")])
    assert (score.status, score.reward) == ("ok", reward)


def test_the_questions_of_the_search_agent_are_in_its_passages() -> None:
    passages = (SEARCH.parent / "passages.jsonl").read_text(encoding="utf-8")
    for line in (SEARCH.parent / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["answer"] in passages
