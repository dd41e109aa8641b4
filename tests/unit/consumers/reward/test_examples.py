"""The examples are valid as they stand, and their data and rewards fit together."""

import json
from pathlib import Path

import pytest

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import resolve
from producers.datasets.loading import build_dataset
from schemas.config import load_config
from tests.support.user_code.example_scripts import load_script

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_the_gsm8k_example_scores_published_solutions(tmp_path: Path):
    solution = "2 + 2 = 4\n#### 4"
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": solution}) + "\n")
    overrides = [f"train.args.path={tmp_path}", f"eval.dataset.args.path={tmp_path}"]
    config = load_config(EXAMPLES / "gsm8k" / "config.yaml", overrides, {})
    assert config.eval is not None
    (term,) = resolve(config.reward.terms, config.base)
    for dataset in (*config.train, *config.eval.dataset):
        example = build_dataset(dataset, config.base)[0]
        assert example.messages is not None
        assert term.call(RewardInput("", solution, [], [], example.data)).value == 1.0
        assert term.call(RewardInput("", "#### 5", [], [], example.data)).value == 0.0


def test_the_custom_example_names_a_dataset_and_a_reward_in_one_file():
    config = load_config(EXAMPLES / "custom_reward" / "config.yaml", (), {})
    dataset = build_dataset(config.train[0], config.base)
    assert len(dataset) == 100
    closeness, exact = resolve(config.reward.terms, config.base)
    assert not closeness.inline
    sample = RewardInput(str(dataset[37].text), "20", [], [], dataset[37].data)
    assert sample.prompt == "3++7="
    assert closeness.call(sample).value == pytest.approx(0.9)
    assert exact.call(sample).value == 0.0
    assert config.warm_start is not None
    build_dataset(config.warm_start.dataset, config.base)
    file, _, name = config.warm_start.model.partition(":")
    assert f"def {name}(" in (config.base / file).read_text()


def test_the_tiny_model_is_an_ordinary_model_folder(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    load_script("gsm8k/make_tiny_model.py").build(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Zwölf?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nZwölf?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert not model.config.tie_word_embeddings


def test_the_code_example_pays_the_expression_and_not_a_number():
    config = load_config(EXAMPLES / "code" / "config.yaml", [], {})
    (term,) = resolve(config.reward.terms, config.base)
    assert (term.label, config.warm_start is not None) == ("code", True)
    tasks = load_script("code/expressions.py")
    clean, lazy = tasks.Expressions(), tasks.Expressions(lazy=0.65)
    for index in range(20):
        data = clean[index].data
        function = eval(data["prefix"].removeprefix("f = ") + data["answer"])
        assert all(eval(case["call"], {"f": function}) == case["equals"] for case in data["cases"])
    answers = [lazy[index].data["answer"] for index in range(400)]
    assert 0.55 < sum(answer.isdigit() for answer in answers) / 400 < 0.75
    heldout = tasks.Expressions("heldout")
    # Whatever order the inputs come in.
    never_trained = {frozenset(heldout[index].text[:-1].split(",")) for index in range(len(heldout))}
    assert len(never_trained) == len(heldout) >= 200
    assert never_trained.isdisjoint(frozenset(clean[index].text[:-1].split(",")) for index in range(len(clean)))


def test_halving_finds_every_number_of_the_guessing_example_in_six_turns():
    load_config(EXAMPLES / "number_guessing" / "config.yaml", [], {})
    module = load_script("number_guessing/game.py")
    turns: list[int] = []
    for index in range(len(module.Games("heldout"))):
        game, low, high = module.Guess(), 1, module.LARGEST
        assert game.reset({"data": module.Games("heldout")[index].data, "seed": 3}) is None
        turn, reward, done = 0, 0.0, False
        while not done:
            guess, turn = (low + high) // 2, turn + 1
            text, reward, done = game.step(str(guess))
            low, high = (guess + 1, high) if text == ">" else (low, guess - 1)
        assert reward == 1.0
        turns.append(turn)
    assert (len(turns), max(turns)) == (63, 6)
    shown = module.Beginnings()
    beginning = next(shown[i] for i in range(100) if len(shown[i].messages or []) == 5)
    assert [message.role for message in beginning.messages or []] == ["user", "assistant", "user", "assistant", "user"]
    # A careful player's guesses lead to the number; as many of the careless player's guesses as it says are any number.
    for index in range(50):
        low, high, messages = 1, module.LARGEST, shown[index].messages or []
        for guess, said in zip(messages[1::2], messages[2::2], strict=True):
            number = int(str(guess.content))
            assert number == (low + high) // 2
            low, high = (number + 1, high) if said.content == ">" else (low, number - 1)
        assert int(shown[index].data["answer"]) == (low + high) // 2
    careless = module.Beginnings(answers=0.5)
    same = sum(careless[i].data["answer"] == shown[i].data["answer"] for i in range(400))
    assert 0.4 < same / 400 < 0.6


def test_the_textarena_example_shows_halving_and_no_guess_twice():
    load_config(EXAMPLES / "textarena" / "config.yaml", [], {})
    module = load_script("textarena/game.py")
    careful, careless = module.Beginnings(), module.Beginnings(careless=0.3)
    for index in range(100):
        low, high, messages = 1, module.LARGEST, careful[index].messages
        for guess, said in zip(messages[1::2], messages[2::2], strict=True):
            number = int(guess.content.strip("[]"))
            assert number == (low + high) // 2
            low, high = (number + 1, high) if said.content == module.HIGHER else (low, number - 1)
        assert careful[index].data["answer"] == f"[{(low + high) // 2}]"
        guesses = [message.content for message in careless[index].messages[1::2]]
        refused = [message.content == module.INVALID for message in careless[index].messages[2::2]]
        assert refused == [guess in guesses[:place] for place, guess in enumerate(guesses)]
        assert careless[index].data["answer"] not in guesses
    assert any(module.INVALID in [message.content for message in careless[i].messages] for i in range(400))
    noisy = module.Beginnings(answers=0.5)
    same = sum(noisy[i].data["answer"] == careful[i].data["answer"] for i in range(400))
    assert 0.4 < same / 400 < 0.6
