"""`dotllm chat` through a pipe: turns, commands, what is computed again and what is not."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from commands import Result, Run
from test_cli_run import CHATML

from dotllm.cli.conversation import Conversation, Turn
from dotllm.cli.dialogue import Dialogue
from dotllm.errors import UsageError

CHAT = ("chat", "--backend", "numpy", "-n", "4")
STATS = re.compile(r"\[(\d+) prompt tokens(?: \((\d+) cached\))?, (\d+) generated")


def turns(result: Result) -> list[tuple[int, int, int]]:
    """(prompt tokens, cached of them, generated) of each turn."""
    assert result.code == 0, result.err
    return [(int(a), int(b or 0), int(c)) for a, b, c in STATS.findall(result.err)]


@pytest.fixture
def template(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "template.jinja"
    path.write_text(CHATML)
    return "--chat-template-file", str(path)


def test_a_model_without_a_template_goes_on_from_your_words(cli: Run) -> None:
    result = cli(*CHAT, stdin="Once upon a time\n\nThe king said\n")
    first, second = turns(result)
    assert result.out.splitlines()[0] == " there lived a king"
    assert "goes on from your words" in result.err
    assert first == (4, 0, 4)
    assert second == (4 + 4 + 3, 3, 4)


def test_a_turn_computes_only_what_is_new(cli: Run, template: tuple[str, str]) -> None:
    first, again, second, after_undo, after_clear = turns(
        cli(*CHAT, *template, stdin="Hello\n/regen\nWho are you?\n/undo\nWhy?\n/clear\nHello\n")
    )
    opening = 5  # tokens that the template puts before a reply, which the next prompt need not repeat
    assert first[1] == 0
    assert again == (first[0], again[1], 4)
    assert first[0] - opening <= again[1] < first[0]
    assert second[1] == again[1]
    assert after_undo[1] >= again[1]
    assert after_clear == first


def test_the_same_words_with_and_without_checkpoints(
    cli: Run, template: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "Hello\nWho are you?\n/undo\nWhy?\n"
    with_checkpoints = cli(*CHAT, *template, stdin=lines)
    assert any(cached for _, cached, _ in turns(with_checkpoints))
    monkeypatch.setattr(Dialogue, "_fitting", lambda *_: None)
    without = cli(*CHAT, *template, stdin=lines)
    assert not any(cached for _, cached, _ in turns(without))
    assert with_checkpoints.out == without.out


def test_regenerate_finds_other_words_unless_greedy(cli: Run) -> None:
    first, second = cli(*CHAT, "--temp", "2", "-s", "5", stdin="Once\n/regen\n").out.splitlines()
    assert first != second
    first, second = cli(*CHAT, stdin="Once\n/regen\n").out.splitlines()
    assert first == second


def test_a_conversation_survives_saving_and_loading(cli: Run, template: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    saved = cli(*CHAT, *template, "-sys", "Be good", stdin=f"Hello\n/save {path}\nAnd now?\n")
    content = json.loads(path.read_text())
    assert [m["role"] for m in content["messages"]] == ["system", "user", "assistant"]
    loaded = cli(*CHAT, *template, stdin=f"/load {path}\n/system\nAnd now?\n")
    assert "system prompt: Be good" in loaded.err
    assert loaded.out == saved.out.split("\n", 1)[1]
    assert turns(loaded)[0][0] == turns(saved)[1][0]


def test_bad_files_are_refused_and_nothing_is_lost(cli: Run, tmp_path: Path) -> None:
    bad = {
        "not json": "hello",
        "another format": '{"messages": []}',
        "messages are no list": '{"format": "dotllm conversation 1", "messages": 3}',
        "two questions": json.dumps({"format": "dotllm conversation 1", "messages": [{"role": "user", "content": 1}]}),
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    lines = "".join(f"/load {tmp_path / name}\n" for name in (*bad, "absent"))
    precious = tmp_path / "precious.txt"
    precious.write_text("keep me")
    result = cli(*CHAT, stdin=f"Once upon a time\n{lines}/save {precious}\n/save\n/save {tmp_path}/no/such\nThe king\n")
    assert result.err.count("not a saved conversation") >= 4
    assert "cannot be read" in result.err
    assert "needs the name of a file" in result.err
    assert "cannot be written" in result.err
    assert precious.read_text() == "keep me"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*bad, "precious.txt"])
    assert turns(result)[1][1] == 3  # the first turn is still there


def test_no_name_of_a_file_ends_the_conversation(cli: Run, tmp_path: Path) -> None:
    names = (
        "~nobody-of-that-name/talk",
        f"{tmp_path}/{300 * 'x'}",
        f"{tmp_path}/zero\0byte",
        f"{tmp_path}/{250 * 'x'}",
    )
    lines = "".join(f"/save {name}\n/load {name}\n" for name in names)
    result = cli(*CHAT, stdin=f"Once upon a time\n{lines}The king\n")
    assert len(turns(result)) == 2
    assert turns(result)[1][1] == 3
    assert not list(tmp_path.iterdir())


def test_text_that_is_not_unicode_can_be_saved(cli: Run, tmp_path: Path) -> None:
    path, again = tmp_path / "talk.json", tmp_path / "again.json"
    Conversation(turns=[Turn("a\udcffb\ud83d", "c")]).save(path, "model")
    assert cli(*CHAT, stdin=f"/load {path}\n/save {again}\n/regen\n").code == 0
    assert Conversation.load(again).turns == [Turn("a\udcffb\ud83d", "c")]
    assert path.read_bytes().isascii()


def test_commands_and_messages_that_cannot_be_followed(cli: Run) -> None:
    result = cli(*CHAT, stdin="/undo\n/regen\n/nonsense\n/system Be good\n//slash\n/help\n/exit\nnever read\n")
    assert result.code == 0
    assert result.err.count("nothing has been said yet") == 2
    assert "/nonsense is not a command" in result.err
    assert "needs a chat template" in result.err
    assert "/regen  " in result.err
    assert len(turns(result)) == 1


def test_messages_of_several_lines(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    cli(*CHAT, stdin=f'"""One\n two\n\nthree"""\nfour \\\nfive\n/save {path}\n')
    said = [m["content"] for m in json.loads(path.read_text())["messages"] if m["role"] == "user"]
    assert said == ["One\n two\n\nthree", "four \nfive"]


def test_a_full_context_is_said_and_can_be_left(cli: Run) -> None:
    result = cli("chat", "--backend", "numpy", "-c", "12", stdin="Once upon a time\nThe king\n/undo\nOnce\n")
    first, second = turns(result)
    assert sum((first[0], first[2])) == 12
    assert "the context of 12 tokens is full" in result.err
    assert "/undo takes back the last turn" in result.err  # of the message that did not fit
    assert "the message is taken back" in result.err
    assert second[0] + second[2] == 12


def test_ctrl_c_stops_the_reply_and_keeps_what_was_said(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.json"
    whole = Dialogue.reply

    def interrupted(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        for number, event in enumerate(whole(*args, **kwargs)):
            if number == 2:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(Dialogue, "reply", interrupted)
    result = cli(*CHAT, stdin=f"Once upon a time\n/save {path}\n")
    assert result.code == 0
    assert "[stopped]" in result.err
    assert json.loads(path.read_text())["messages"][1]["content"] == " there lived"


def test_reasoning_is_kept_apart(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dotllm.engine.request import Event

    def thinking(*_: Any, **__: Any) -> Generator[Event, None, None]:
        yield from (Event(1, 0, text) for text in ("<thi", "nk>\nhm", "m</think>", "\n\nYes", "."))

    monkeypatch.setattr(Dialogue, "reply", thinking)
    path = tmp_path / "talk.json"
    result = cli(*CHAT, stdin=f"Well?\n/save {path}\n")
    assert result.out == "hmm\n\nYes.\n"
    reply = json.loads(path.read_text())["messages"][1]
    assert reply == {"role": "assistant", "content": "Yes.", "reasoning_content": "hmm"}


def test_a_conversation_as_data() -> None:
    talk = Conversation()
    for call in (talk.undo, talk.regenerate):
        with pytest.raises(UsageError, match="nothing has been said"):
            call()
    talk.ask("a")
    talk.answer("b", "c")
    talk.ask("d")
    assert [m["role"] for m in talk.messages()] == ["user", "assistant", "user"]
    assert talk.undo() == Turn("d")
    assert talk.regenerate() == Turn("a", "b", "c")
    assert talk.turns == [Turn("a")]
