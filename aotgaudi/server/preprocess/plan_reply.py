"""Decides how the reply to a chat is read: which text is a call of a tool, and which is reasoning."""

from __future__ import annotations

from aotgaudi.errors import RequestError
from aotgaudi.server.options import ReplyParsers
from aotgaudi.server.preprocess.protocol import ChatCompletionRequest
from aotgaudi.server.preprocess.tools import ChosenTool
from aotgaudi.server.reply.plan import ReplyPlan
from aotgaudi.server.reply.reasoning import Thinks, thinks_after
from aotgaudi.server.reply.tool_calls import Calls


def plan_reply(
    body: ChatCompletionRequest, prompt: str, parsers: ReplyParsers, *, is_constrained: bool
) -> ReplyPlan | None:
    """Returns how the reply to `prompt`, the rendered `body`, is read; None if all of it is content.

    With `is_constrained`, the constraint holds from the first token, so the reply has no reasoning.

    Raises:
        RequestError: 400; the server was started without the format in which this model calls tools.
    """
    calls = _calls_of(body, parsers)
    if calls is None and parsers.reasoning_parser is None:
        return None
    thinks: Thinks = "no"
    if parsers.reasoning_parser is not None and not is_constrained:
        thinks = thinks_after(prompt, parsers.reasoning_parser)
    return ReplyPlan(
        calls=calls,
        function=body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else "",
        has_parallel_calls=body.parallel_tool_calls is not False,
        thinks=thinks,
        has_reasoning=parsers.reasoning_parser is not None,
        shows_reasoning=body.include_reasoning is not False,
    )


def _calls_of(body: ChatCompletionRequest, parsers: ReplyParsers) -> Calls | None:
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, ChosenTool):
        return "one"
    if body.tool_choice == "required":
        return "list"
    if not parsers.enable_auto_tool_choice or parsers.tool_call_parser is None:
        raise RequestError(
            "tool_choice 'auto', the default with 'tools', needs a server that was started with --enable-auto-tool-choice "
            "and --tool-call-parser",
            param="tool_choice",
        )
    return parsers.tool_call_parser
