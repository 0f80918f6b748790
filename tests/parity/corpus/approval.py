"""Approval and review policies: what is decided of calls and of results, by task and by `react`."""

from __future__ import annotations

from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.approval import Approval, ApprovalPolicy, Approver, approver, auto_approver
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageTool
from inspect_ai.review import Review, Reviewer, ReviewPolicy, reviewer
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolCall, ToolCallView, ToolResult
from tests.functions import make_tool
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.testing.replies import call, say, submit


@make_tool
async def erase(path: str) -> str:
    """Erase a file.

    Args:
        path: Which one.
    """
    return f"erased {path}"


@approver
def careful() -> Approver:
    """Lets a name pass, changes one, rejects one, ends everything at another."""

    async def approve(
        message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]
    ) -> Approval:
        match call.arguments.get("path"):
            case "safe":
                return Approval(decision="approve", explanation="harmless")
            case "wrong":
                changed = ToolCall(id=call.id, function=call.function, arguments={"path": "right"})
                return Approval(decision="modify", modified=changed, explanation="meant right")
            case "mine":
                return Approval(decision="reject", explanation=f"not yours ({len(history)})")
            case "all":
                return Approval(decision="terminate", explanation="too much")
            case _:
                return Approval(decision="escalate")

    return approve


def erasing(policies: list[ApprovalPolicy]) -> Task:
    return Task(
        dataset=[Sample(input="Clean up.", target="done")],
        solver=[use_tools(erase()), generate()],
        scorer=includes(),
        approval=policies,
    )


@case(
    script=[say("", call("erase", path="safe")), "done"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["erased safe"]),
)
def approved() -> Task:
    return erasing([ApprovalPolicy(careful(), "*")])


@case(
    script=[say("", call("erase", path="mine")), "done"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["not yours"]),
)
def rejected() -> Task:
    return erasing([ApprovalPolicy(careful(), "*")])


@case(
    script=[say("", call("erase", path="wrong")), "done"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["erased right"]),
)
def modified() -> Task:
    return erasing([ApprovalPolicy(careful(), "*")])


@case(
    script=[say("done?", call("erase", path="all"))],
    expect=Expect(turns=1, scores={"includes": "C"}, limit="operator"),
)
def terminated() -> Task:
    return erasing([ApprovalPolicy(careful(), "*")])


@case(
    script=[say("", call("erase", path="else")), "done"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["erased else"]),
)
def escalated_to_the_next_approver() -> Task:
    return erasing(
        [ApprovalPolicy(careful(), "er*"), ApprovalPolicy(auto_approver("approve"), "*")]
    )


@case(
    script=[say("", call("erase", path="else")), "done"],
    expect=Expect(turns=2, scores={"includes": "C"}),
)
def no_approver_for_a_tool() -> Task:
    return erasing([ApprovalPolicy(auto_approver("approve"), "other_*")])


@case(
    script=[say("", call("erase", path="mine")), submit("done")],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["not yours"]),
)
def policy_of_a_react_agent() -> Task:
    return Task(
        dataset=[Sample(input="Clean up.", target="done")],
        solver=react(
            tools=[erase()],
            approval=[
                ApprovalPolicy(careful(), "erase"),
                ApprovalPolicy(auto_approver("approve"), "*"),
            ],
        ),
        scorer=includes(),
    )


@reviewer
def watchful() -> Reviewer:
    """Hands a result on to the next reviewer, or ends everything, by what it says."""

    async def review(
        message: str,
        call: ToolCall,
        result: ChatMessageTool,
        output: ToolResult,
        view: ToolCallView,
        history: list[ChatMessage],
    ) -> Review:
        if result.text == "erased all":
            return Review(decision="terminate", explanation="seen enough")
        return Review(decision="escalate")

    return review


@case(
    script=[say("", call("erase", path="safe")), say("", call("erase", path="all"))],
    expect=Expect(turns=2, scores={"includes": "I"}, limit="operator", says=["erased safe"]),
)
def ended_by_a_reviewer() -> Task:
    return Task(
        dataset=[Sample(input="Clean up.", target="done")],
        solver=[use_tools(erase()), generate()],
        scorer=includes(),
        review=[ReviewPolicy(watchful(), "erase")],
    )
