"""What tests cost, summed by folder."""

from pathlib import Path

from tools.costs import costs

FILE = """<testsuites><testsuite>
<testcase classname="tests.unit.broker.test_commands" name="a" time="1.5">
<properties><property name="processor_s" value="0.5"/></properties></testcase>
<testcase classname="tests.unit.broker.weights.test_weights" name="b" time="2"/>
<testcase classname="tests.e2e.system.test_up" name="c" time="9">
<properties><property name="processor_s" value="20"/></properties></testcase>
</testsuite></testsuites>"""


def test_the_dearest_folder_comes_first_and_a_test_without_a_count_is_counted(tmp_path: Path) -> None:
    (tmp_path / "costs.xml").write_text(FILE)
    found = costs([tmp_path / "costs.xml"])
    assert list(found.items()) == [("tests/e2e/system", (1, 9.0, 20.0)), ("tests/unit/broker", (2, 3.5, 0.5))]
