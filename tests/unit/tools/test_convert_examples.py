"""The count of what `tidemill convert` makes of examples finds what is lost, by means that are not the converter's."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.migrate.conversion import Conversion
from deploy.migrate.convert import SYSTEMS
from deploy.migrate.rules import ConversionRule
from deploy.migrate.verl import SYSTEM
from tools.convert_examples import command_line, measure

SCRIPT = """
set -x
n=$((2 * 4))
more=(trainer.logger='["console"]' "data.train_files=$HOME/a b/train.parquet")
if [[ $n -gt 4 ]]; then more+=(trainer.nnodes=${NODES:-1}); fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$n "${more[@]}" $@
"""

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bwrap, in which bash runs no program")


def test_bash_tells_the_command_line_of_a_script(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT + "touch " + str(tmp_path / "made") + "\n")
    assert command_line(file) == [
        *("python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"),
        *('trainer.logger=["console"]', "data.train_files=~/a b/train.parquet", "trainer.nnodes=1"),
    ]
    assert not (tmp_path / "made").exists()


def test_a_setting_that_makes_no_difference_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that does not read a setting."""
    file = tmp_path / "run.sh"
    file.write_text("python3 -m verl.trainer.main_ppo data.train_batch_size=8 data.kept=2 data.lost=1\n")
    rules = (
        ConversionRule("data.train_batch_size", "trainer.batch_groups", convert=int),
        ConversionRule("data.kept", note="told"),
    )

    def nothing(done: Conversion) -> None:
        done.set("reward.terms", [{"name": "exact"}])

    def read(file: Path, text: str) -> Mapping[str, Any]:
        return {key: value for key, value in SYSTEM.read(file, text).items() if key != "data.lost"}

    monkeypatch.setitem(SYSTEMS, "verl", replace(SYSTEM, rules=rules, convert=nothing, read=read))
    found = measure(file, "verl")
    assert (found["lost"], found["misread"]) == (["data.lost"], [])
    assert (found["outcome"], "train" in found["why"]) == ("malformed", True)
