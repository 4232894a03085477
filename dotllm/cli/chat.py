"""`dotllm chat`: a conversation at the terminal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dotllm.cli.console import Console, set_log_level
from dotllm.cli.conversation import Conversation
from dotllm.cli.dialogue import Dialogue
from dotllm.cli.format import ChatPrompt, template_format
from dotllm.cli.interrupt import interruptible
from dotllm.cli.locate import model_path
from dotllm.cli.options import (
    GenerateOptions,
    ModelArgument,
    ModelFlag,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    flag,
)
from dotllm.cli.prompt import token_limit
from dotllm.cli.reader import ReadLine, line_reader, read_message
from dotllm.cli.report import header_lines, turn_line
from dotllm.cli.session import open_session, sampling_params
from dotllm.errors import ContextOverflow, DotLLMError, UsageError

if TYPE_CHECKING:
    from dotllm.engine.request import Event
    from dotllm.text.parsers import Part

__all__ = ["chat"]

_HELP = """\
/regen           reply to the last message again, in other words if --temp is above 0
/undo            take back the last message and its reply
/clear           forget the conversation, keep the system prompt
/system [TEXT]   set the system prompt, or show it
/save FILE       write the conversation to a file
/load FILE       go on with a saved conversation
/help            this list
/exit, /quit     leave (as does Ctrl-D)
//text           send a message that begins with a slash
Several lines: end a line with \\, or put the message between two \"\"\"; Alt-Enter makes a new line.
Ctrl-C stops a reply; at the empty prompt it leaves."""

_COMMANDS = ("/regen", "/undo", "/clear", "/system", "/save", "/load", "/help", "/exit", "/quit")


def chat(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    n_predict: Annotated[
        int,
        flag("-n", "--n-predict", "--predict", "--max-tokens", metavar="N", help="Most tokens a reply; -1 = no limit."),
    ] = 512,
    *,
    how: ModelOptions,
    sampling: SamplingOptions,
    generate: GenerateOptions,
    output: OutputOptions,
) -> None:
    """Chat with a model; /help lists what else can be said. A model without a chat template goes on from your words."""
    from dotllm.engine.request import Request

    console = Console(quiet=output.quiet)
    set_log_level(verbose=output.verbose, quiet=output.quiet)
    params, limit = sampling_params(sampling), token_limit(n_predict)
    if params.top_logprobs is not None:
        raise UsageError("--top-logprobs is for `run --json`; a chat does not show log probabilities")
    with open_session(model_path(model, model_flag), how, console, checkpoints=1) as session:
        chat_format = None
        if not generate.raw:
            chat_format = template_format(session.file, session.tokenizer, generate.chat_template_file)
        note = "none: the model goes on from your words" if chat_format is None else chat_format.note
        for line in header_lines(session, params, note):
            console.note(line, "dim")
        settings = Request(
            prompt=(),
            sampling=params,
            max_tokens=limit,
            stop=tuple(generate.reverse_prompt),
            ignore_eos=generate.ignore_eos,
        )
        dialogue = Dialogue(session, chat_format, settings)
        talk = Chat(console, dialogue, line_reader(console, _COMMANDS), session.config.name, session.context)
        talk.templated = chat_format is not None
        if generate.system is not None:
            talk.set_system(generate.system)
        talk.loop()


class Chat:
    """The loop of reading, doing and replying, and the conversation that it is about."""

    def __init__(self, console: Console, dialogue: Dialogue, read: ReadLine, model: str, context: int) -> None:
        self.console, self.dialogue, self.read, self.model, self.context = console, dialogue, read, model, context
        self.conversation = Conversation()
        self.templated = True
        self._attempt = 0

    def loop(self) -> None:
        """Until /exit or the end of input."""
        self.console.note("/help lists commands; Ctrl-D leaves", "dim")
        while True:
            try:
                text = read_message(self.read, "> ")
            except EOFError:
                return
            if text in ("/exit", "/quit"):
                return
            try:
                self._do(text)
            except DotLLMError as error:
                self.console.error(f"{error}")

    def set_system(self, text: str) -> None:
        """Raises UsageError if the model has no template to put it in."""
        if not self.templated:
            raise UsageError("a system prompt needs a chat template, and this model has none")
        self.conversation.system = text or None

    def _do(self, text: str) -> None:
        if not text:
            return
        if text.startswith("//"):
            self._say(text[1:])
        elif text.startswith("/"):
            name, _, argument = text.partition(" ")
            self._command(name, argument.strip())
        else:
            self._say(text)

    def _command(self, name: str, argument: str) -> None:
        if name == "/help":
            self.console.answer(_HELP)
        elif name == "/regen":
            self._regenerate()
        elif name == "/undo":
            self.console.note(f"taken back: {self.conversation.undo().user}", "dim")
        elif name == "/clear":
            self.conversation = Conversation(system=self.conversation.system)
            self.dialogue.forget()
            self.console.note("the conversation is empty", "dim")
        elif name == "/system":
            if argument:
                self.set_system(argument)
            self.console.answer(f"system prompt: {self.conversation.system or 'none'}")
        elif name in ("/save", "/load"):
            self._file(name, argument)
        else:
            raise UsageError(f"{name} is not a command; /help lists them (// sends a text that begins with a slash)")

    def _file(self, name: str, argument: str) -> None:
        if not argument:
            raise UsageError(f"{name} needs the name of a file")
        try:
            path = Path(argument).expanduser()
        except RuntimeError as error:
            raise UsageError(f"{argument}: {error}") from error
        if name == "/save":
            self.conversation.save(path, self.model)
            self.console.note(f"saved {len(self.conversation.turns)} turns to {path}", "dim")
            return
        loaded = Conversation.load(path)
        if loaded.system and not self.templated:
            raise UsageError(f"{path} has a system prompt, which needs a chat template, and this model has none")
        self.conversation = loaded
        self.console.note(f"loaded {len(loaded.turns)} turns from {path}", "dim")

    def _say(self, text: str) -> None:
        self.conversation.ask(text)
        self._attempt = 0
        answered = False
        try:
            answered = self._reply()
        finally:
            if not answered:
                self.conversation.undo()
                self.console.note("[no reply; the message is taken back]", "dim")

    def _regenerate(self) -> None:
        before = self.conversation.regenerate()
        self._attempt += 1
        answered = False
        try:
            answered = self._reply()
        finally:
            if not answered:
                self.conversation.answer(before.reply, before.reasoning)
                self.console.note("[no reply; the one before stays]", "dim")

    def _reply(self) -> bool:
        """Stream a reply to the last message; Ctrl-C ends it, and what was said stays. False if that is nothing."""
        reply = Reply(self.console)
        try:
            with interruptible():
                prompt = self.dialogue.prompt(self.conversation)
                reply.stream(self.dialogue, prompt, self._attempt)
        except ContextOverflow as error:
            raise ContextOverflow(f"{error} /undo takes back the last turn, /clear forgets all of them.") from error
        except KeyboardInterrupt:
            self.console.note("\n[stopped]", "dim")
        if reply.last is not None:
            self._close(reply.last)
        if not reply.content and not reply.reasoning:
            return False
        self.conversation.answer(reply.content, reply.reasoning)
        return True

    def _close(self, last: Event) -> None:
        stats = last.stats
        if stats is None:
            return
        self.console.note(turn_line(stats), "dim")
        if last.finish_reason == "length" and stats.prompt_tokens + stats.generated_tokens >= self.context:
            self.console.note(
                f"the context of {self.context} tokens is full: /undo takes back turns, /clear forgets them", "yellow"
            )
        elif last.finish_reason == "length":
            self.console.note(f"[cut off after {stats.generated_tokens} tokens; -n allows more]", "dim")


class Reply:
    """A reply as it is printed: reasoning dim, then what is said."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.content = self.reasoning = ""
        self.last: Event | None = None

    def stream(self, dialogue: Dialogue, prompt: ChatPrompt, attempt: int) -> None:
        """Print as it comes; `content` and `reasoning` hold what came so far, whatever ends it."""
        from dotllm.text.parsers import ReasoningSplitter

        splitter = ReasoningSplitter(starts_inside=prompt.inside_reasoning)
        try:
            with closing(dialogue.reply(prompt, attempt=attempt)) as events:
                for event in events:
                    self._show(splitter.push(event.text))
                    self.last = event
        finally:
            self._show(splitter.finish())
            if self.content or self.reasoning:
                self._console.write("\n")

    def _show(self, parts: list[Part]) -> None:
        for kind, text in parts:
            if kind == "reasoning":
                self.reasoning += text
                self._console.write(text, "dim")
            else:
                if self.reasoning and not self.content:
                    self._console.write("\n\n")
                self.content += text
                self._console.write(text)
