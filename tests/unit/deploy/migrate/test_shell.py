"""Command lines of a shell script come out as bash would pass them, and what only a run tells is marked."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.migrate.shell import UNKNOWN, command_lines


def words(script: str) -> list[str]:
    """The words of the script's command ``show``."""
    return next(line[1:] for line in command_lines(script) if line[:1] == ["show"])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show a=1 \\\n  'b=2 3' \"c=4\"", ["a=1", "b=2 3", "c=4"]),
        ("n=$((1024 * 2)); show a=$((n + 3 * (n - 1) / 2)) b=$((-n % 7))", ["a=5118", "b=-4"]),
        ('x="\n  a=1 \\\n  b=2"; show $x c=3', ["a=1", "b=2", "c=3"]),
        ('x=(a=1 "b=2 3"); x+=(c=$((1 + 1))); show "${x[@]}"', ["a=1", "b=2 3", "c=2"]),
        ('show a=1 "$@" $@ ${1:-b=2}', ["a=1", "b=2"]),
        ('root=${ROOT:-"${HOME}/verl"}; show p=${root}/x q="$HOME/y"', ["p=~/verl/x", "q=~/y"]),
        ('x=a.b=1; show "${x//a.b/c}" ${x%=*} ${x#*.} ${x^^}', ["c=1", "a.b", "b=1", "A.B=1"]),
        ("f() { show a=$v; }; v=3; f", ["a=3"]),
        ('b=vllm; if [ "$b" = "vllm" ]; then m=1; else m=2; fi; show m=$m', ["m=1"]),
        ("if [[ -z $UNSET && 3 -gt 2 ]]; then m=1; elif true; then m=2; fi; show m=$m", ["m=1"]),
        ("case vllm in sglang) m=1;; vl*) m=2;; esac; show m=$m", ["m=2"]),
        ("for x in a b; do y=$y$x; done; y=; for x in a b; do y=$y$x; done; show $y", ["ab"]),
        ("[ 1 -eq 2 ] || m=1; [ 1 -eq 2 ] && m=2; show m=$m", ["m=1"]),
        ("export A=1 B=2; E=3 show $A$B 2>&1 | tee log", ["12"]),
        (": ${A:=5}; show ${A} ${A:+set} ${#A}", ["5", "set", "1"]),
        ("show p=$(pwd)/x q=$PWD/y", ["p=./x", "q=./y"]),
        ("d=${DEVICE:-$(probe && echo npu || echo gpu)}; show d=$d", ["d=gpu"]),
    ],
)
def test_words(script: str, expected: list[str]) -> None:
    assert words(script) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show a=$MODEL", ["a=?$MODEL"]),
        ("show a=x-$(date +%d)-y", ["a=x-?$(date +%d)-y"]),
        ("n=$((GPUS * 2)); show a=$n", ["a=?$((GPUS * 2))"]),
        ("m=1; if [ -d data ]; then m=2; fi; show a=$m", ["a=?${m}"]),
        ("m=1; while read x; do m=2; done; show a=$m", ["a=?${m}"]),
        ("m=1; if [ $N -gt 2 ]; then m=2; fi; show a=$m", ["a=?${m}"]),
        ('x="a=$(date +%d) b=1"; show $x', ["a=?$(date +%d)", "b=1"]),
    ],
)
def test_what_only_a_run_tells_is_marked(script: str, expected: list[str]) -> None:
    assert words(script) == [word.replace("?", UNKNOWN) for word in expected]


def test_a_text_that_is_no_script_is_told_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2 is not understood as bash"):
        command_lines("ls\nshow 'open\n")


NAMES = st.sampled_from(["a", "b", "c"])
WORDS = st.text("abx_1/.", min_size=1, max_size=5)
NUMBERS = st.integers(-9, 99).map(str)
SUMS = st.recursive(
    NUMBERS | NAMES.map(lambda name: f"n{name}"),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=4,
)
USES = NAMES.flatmap(
    lambda name: st.sampled_from(
        [
            f"${name}",
            f"${{{name}}}",
            f'"${name}"',
            f"${{{name}:-no}}",
            f"${{{name}%x*}}",
            f"${{{name}/a/b}}",
            f"${{#{name}}}",
        ]
    )
)


@settings(max_examples=60)
@given(
    st.fixed_dictionaries({name: WORDS for name in "abc"}),
    st.fixed_dictionaries({name: NUMBERS for name in "abc"}),
    st.lists(
        st.one_of(USES, SUMS.map(lambda text: f"k=$(({text}))"), WORDS.map("k={}".format)), min_size=1, max_size=5
    ),
)
def test_words_are_those_of_bash(texts: dict[str, str], numbers: dict[str, str], given_words: list[str]) -> None:
    lines = [f"{name}={text}" for name, text in texts.items()] + [f"n{name}={one}" for name, one in numbers.items()]
    script = "\n".join([*lines, "show " + " ".join(given_words)])
    bash = "show() { printf '%s\\n' \"$@\"; }\n" + script
    told = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True, cwd="/").stdout.splitlines()
    assert words(script) == [word for word in told if word]
