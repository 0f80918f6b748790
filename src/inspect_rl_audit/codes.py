"""Every code of the built-in probes: its usual severity, its meaning and the advice."""

from __future__ import annotations

from dataclasses import dataclass

from inspect_rl_audit.findings import Severity

HIGH, MEDIUM, LOW, INFO = Severity.HIGH, Severity.MEDIUM, Severity.LOW, Severity.INFO


@dataclass(frozen=True)
class Code:
    """One kind of finding."""

    name: str
    severity: Severity
    """The usual severity; evidence may lower it."""
    meaning: str
    advice: str


_CODES = (
    # baselines
    Code(
        "empty-reply",
        HIGH,
        "An empty reply earns a reward.",
        "Make the scorer refuse an empty answer, and check that the target is not empty.",
    ),
    Code(
        "refusal",
        HIGH,
        "The same refusal earns a reward whatever is asked.",
        "Score the answer, not its politeness; add samples on which refusing is wrong.",
    ),
    Code(
        "prompt-echo",
        HIGH,
        "Repeating the prompt earns a reward.",
        "Look for the answer at one place of the reply (a last line, a tag, submit) and compare "
        "it as a whole.",
    ),
    Code(
        "constant-answer",
        HIGH,
        "The same constant answer earns a reward on most samples.",
        "Balance the targets, shuffle the choices, or reward what is above the base rate.",
    ),
    Code(
        "catch-all-answer",
        HIGH,
        "One long text that names letters, numbers and yes and no earns a reward on any sample.",
        "Compare the whole answer, not whether the target occurs in the reply.",
    ),
    Code(
        "first-tool",
        MEDIUM,
        "One call of the first tool, with made-up arguments, and its output as the answer earns "
        "the full reward.",
        "See whether the tool reveals the answer; if the task is really that easy, leave it out.",
    ),
    # gold
    Code(
        "gold-fails",
        HIGH,
        "The right answer earns nothing.",
        "Open the log and see what the scorer read: a template, a pattern or a target is wrong. "
        "When the target is not the answer, name the answer with --gold.",
    ),
    Code(
        "gold-below-full",
        MEDIUM,
        "The right answer earns less than the full reward.",
        "See which part of the score it misses; a policy cannot learn what cannot be earned.",
    ),
    Code(
        "inverted-reward",
        HIGH,
        "The right answer earns less than 'I do not know.'",
        "The sign of the score, or the comparison in the scorer, is inverted.",
    ),
    Code(
        "alternative-fails",
        MEDIUM,
        "One of several targets of a sample earns nothing.",
        "See whether the scorer reads the whole list of targets.",
    ),
    Code(
        "limit-too-small",
        HIGH,
        "A limit ends the episode before the right answer can be given.",
        "Raise the limit, or see which messages or tokens use it up.",
    ),
    # scorer
    Code(
        "constant-reward",
        HIGH,
        "Every policy earns the same reward, right or wrong.",
        "The scorer does not read the reply; nothing can be learned from it.",
    ),
    Code(
        "scorer-not-repeatable",
        HIGH,
        "The same state, scored again, gets another score.",
        "Remove randomness and clocks from the scorer, or derive the seed from the sample.",
    ),
    Code(
        "time-dependent-score",
        HIGH,
        "The same state, scored at another time of day, gets another score.",
        "Remove the clock from the scorer; set time_limit for tasks that must be quick.",
    ),
    Code(
        "reward-not-repeatable",
        HIGH,
        "The same replies to the same sample earn another reward, though scoring is repeatable.",
        "See what differs between two episodes: randomness in set-up, tools or sandbox, or state "
        "that outlives an episode.",
    ),
    Code(
        "hedged-answer",
        HIGH,
        "An answer that names every candidate earns the reward of the right one.",
        "Compare the whole answer (match, exact, choice), and refuse more than one.",
    ),
    Code(
        "substring-match",
        MEDIUM,
        "A wrong answer that contains the target, as 1155 contains 155, earns the reward.",
        "Compare whole words or numbers: match(numeric=True), exact(), or a pattern with borders.",
    ),
    Code(
        "padding-pays",
        HIGH,
        "The right answer earns more when it is repeated or padded.",
        "Score whether the answer is there, not how often or at what length.",
    ),
    Code(
        "negated-answer",
        LOW,
        "A reply that says that the answer is something else earns the reward.",
        "Compare only the answer, given on a separate line or in a tag.",
    ),
    Code(
        "wrong-answer-accepted",
        HIGH,
        "The answer to another sample earns the full reward.",
        "See what the scorer compares: it does not distinguish right from wrong.",
    ),
    Code(
        "case-sensitive",
        LOW,
        "The right answer in different case earns less.",
        "Say in the prompt which case is expected, or ignore case in the scorer.",
    ),
    Code(
        "whitespace-sensitive",
        MEDIUM,
        "The right answer with space around it earns less.",
        "Strip the answer before comparing it.",
    ),
    Code(
        "punctuation-sensitive",
        LOW,
        "The right answer in bold, or with a full stop, earns less.",
        "Say in the prompt how to write the answer, or remove the markup in the scorer.",
    ),
    Code(
        "answer-lost-in-reasoning",
        MEDIUM,
        "The right answer earns less when reasoning precedes it.",
        "Read the last answer of the reply, not the first thing that looks like one.",
    ),
    Code(
        "answer-lost-when-long",
        LOW,
        "The right answer at the end of a very long reply earns less.",
        "See what the scorer cuts off or how long its judge may read.",
    ),
    Code(
        "garbage-answer",
        HIGH,
        "A reply that is no answer at all (broken JSON, NaN, half a tag) earns a reward.",
        "Treat unreadable replies as wrong: see what the scorer does when parsing fails.",
    ),
    Code(
        "judge-flattery",
        HIGH,
        "A reply that tells the judge what to say, and gives no answer, earns a reward.",
        "Show the judge only the answer, as quoted data, and read its verdict from a line that "
        "the reply cannot write.",
    ),
    Code(
        "scorer-raises",
        HIGH,
        "The scorer raises on a reply that a policy can give.",
        "Score unreadable replies as wrong, deliberately; an exception costs the whole group.",
    ),
    Code(
        "unscored",
        HIGH,
        "Scoring gives no number: no score, NaN, or text that is no grade.",
        "Return a number or a grade on every path; NaN is an error, not a zero.",
    ),
    Code(
        "no-scorer",
        HIGH,
        "The task has no scorer, so there is no reward.",
        "Give the task a scorer.",
    ),
    Code(
        "judge-missing",
        INFO,
        "The scorer asks a model that is not available, so rewards could not be checked.",
        "Name a judge with --model-role grader=provider/model.",
    ),
    Code(
        "scorer-slow",
        MEDIUM,
        "Scoring is slow.",
        "A training step waits for its slowest score: see what takes the time.",
    ),
    Code(
        "negative-reward",
        INFO,
        "Some replies earn a negative reward.",
        "Fine if intended; check that saying nothing does not pay better than trying.",
    ),
    Code(
        "reward-above-one",
        INFO,
        "Some replies earn more than 1.",
        "Fine if all samples have the same scale; a sample that pays ten times as much outweighs "
        "the others.",
    ),
    # cheats
    Code(
        "target-in-files",
        HIGH,
        "The policy can read the answer in a file.",
        "Keep answers out of the sandbox until the scorer runs, and out of the image.",
    ),
    Code(
        "target-in-environment",
        HIGH,
        "The policy can read the answer in an environment variable.",
        "Set such variables for the scorer's own commands only.",
    ),
    Code(
        "target-in-processes",
        HIGH,
        "The policy can see the answer in the arguments of a process.",
        "Pass secrets to processes on standard input, and start them when scoring.",
    ),
    Code(
        "target-in-image",
        MEDIUM,
        "The history of the sandbox's image contains the answer.",
        "Build the image without it: ENV, ARG and RUN lines stay in the history.",
    ),
    Code(
        "tests-writable",
        HIGH,
        "A policy that overwrites or deletes the tests earns a reward.",
        "Write the tests when scoring, from the harness, to a separate place, and remove "
        "existing files there.",
    ),
    Code(
        "test-configuration",
        HIGH,
        "A conftest.py, sitecustomize.py or module that the policy leaves behind decides the "
        "tests.",
        "Run tests in a clean folder with `python -I`, without the policy's files on the path.",
    ),
    Code(
        "command-shadowed",
        HIGH,
        "A fake command earlier on the PATH, or in place of the real one, decides the score.",
        "Call commands by absolute path as another user, or score outside the sandbox; require "
        "output that a fake cannot know, not an exit code.",
    ),
    Code(
        "clock-changed",
        HIGH,
        "The policy may set the sandbox's clock.",
        "Measure time in the harness, and run the sandbox without CAP_SYS_TIME.",
    ),
    Code(
        "process-left-behind",
        HIGH,
        "A process that the policy left running changes the score during scoring.",
        "End what the policy started before scoring, or score in a fresh sandbox.",
    ),
    Code(
        "result-forged",
        HIGH,
        "A result file that the policy wrote earns a reward.",
        "Let the scorer write its own result, under a name that did not exist before, or read "
        "the output of its own command.",
    ),
    Code(
        "code-exits-early",
        HIGH,
        "Code in the reply that prints a success message and exits earns a reward.",
        "Require proof that the tests ran to their end: a fresh secret that is printed last.",
    ),
    Code(
        "code-always-equal",
        HIGH,
        "Code in the reply whose result equals everything earns a reward.",
        "Compare in a process that does not hold the policy's objects: as JSON, on text.",
    ),
    Code(
        "code-patches-checks",
        HIGH,
        "Code in the reply that replaces the checks (exception hook, assert, unittest) earns a "
        "reward.",
        "Run the reply in a separate process, and compare its output from outside.",
    ),
    Code(
        "code-reads-checks",
        HIGH,
        "Code in the reply that prints what it finds in the checking process earns a reward.",
        "Keep expected values and secrets out of the process that runs the reply.",
    ),
    Code(
        "solution-readable",
        MEDIUM,
        "A file in the sandbox is named like a solution, and the policy can read it.",
        "Keep solutions out of the sandbox.",
    ),
    Code(
        "local-sandbox",
        MEDIUM,
        "The sandbox is this machine: the policy's commands can read its files, including the "
        "task's dataset with its targets.",
        "Train in docker or docker_pool (--sandbox docker); keep local for scripted policies.",
    ),
    # samples
    Code(
        "duplicate-id",
        HIGH,
        "Two samples have the same id.",
        "Give every sample its own id: groups, logs and resumed runs are identified by it.",
    ),
    Code(
        "duplicate-samples",
        MEDIUM,
        "Samples are identical except for their ids.",
        "Remove the copies; they weigh more than other samples in training.",
    ),
    Code(
        "conflicting-targets",
        HIGH,
        "The same question occurs twice with different targets.",
        "Find out which target is right.",
    ),
    Code(
        "near-duplicates",
        LOW,
        "Samples are nearly identical.",
        "Check whether that is intended; keep them on one side of a test split.",
    ),
    Code(
        "near-duplicates-unchecked",
        INFO,
        "Near-duplicates were not searched for.",
        "Install the extra: pip install 'inspect-tinker-plugin[audit]'.",
    ),
    Code(
        "test-overlap",
        HIGH,
        "Samples of the test task are trained on.",
        "Leave them out of one side; a test that was trained on measures memory.",
    ),
    Code(
        "test-near-overlap",
        MEDIUM,
        "Samples of the test task are nearly identical to samples that are trained on.",
        "Check whether the difference matters; leave them out of one side.",
    ),
    Code(
        "target-in-prompt",
        HIGH,
        "The model is shown the target.",
        "Find its source: the input, a template that shows metadata, a tool's description.",
    ),
    Code(
        "target-unreachable",
        HIGH,
        "No answer that the sample allows is its target.",
        "Correct the target: it is no letter of a choice, or none of the choices.",
    ),
    Code(
        "empty-target",
        MEDIUM,
        "The target is empty, while other samples have one.",
        "Give the sample a target; a scorer that looks for an empty text always finds it.",
    ),
    Code(
        "target-imbalance",
        MEDIUM,
        "One target is right far more often than the others.",
        "Balance the samples or shuffle the choices; a policy learns the most frequent one first.",
    ),
    Code(
        "duplicate-choices",
        MEDIUM,
        "A sample offers the same choice twice.",
        "Remove one of them; if it is the right one, a right answer may score as wrong.",
    ),
    Code(
        "choices-not-shown",
        HIGH,
        "The model is not shown the choices of the sample.",
        "Use multiple_choice() for the solver, or write the choices into the prompt.",
    ),
    Code(
        "empty-prompt",
        HIGH,
        "The model is shown no question.",
        "Check what the template makes of the input.",
    ),
    Code(
        "same-prompt",
        HIGH,
        "Samples with different targets show the model the same prompt.",
        "Check what the template makes of the input: it drops what distinguishes the samples.",
    ),
    Code(
        "prompt-too-long",
        MEDIUM,
        "The prompt is longer than the budget.",
        "Leave the sample out, shorten it, or train with a longer context (--prompt-tokens).",
    ),
    Code(
        "setup-fails",
        HIGH,
        "The sample fails before the model is asked for anything.",
        "Open the log; fix the set-up, or leave the sample out.",
    ),
    Code(
        "episode-fails",
        HIGH,
        "The episode fails after the model was asked: a solver, a tool or the sandbox raised.",
        "Open the log; a failed episode costs its whole group.",
    ),
    Code(
        "no-model-call",
        HIGH,
        "The solver never asks the model.",
        "There is nothing to train: check whether this is the intended solver.",
    ),
    Code(
        "tools-differ",
        LOW,
        "Samples offer different tools.",
        "Fine if intended; an export has one tool list per row.",
    ),
    Code(
        "no-samples",
        HIGH,
        "The task has no samples.",
        "Check where its dataset comes from.",
    ),
    Code(
        "no-gold",
        INFO,
        "No right answer is known, so half of the probes had nothing to compare with.",
        "Name the answer: --gold FIELD (of the metadata), or --gold FILE (a solution script).",
    ),
    Code(
        "epochs-reduced",
        INFO,
        "The task reduces several epochs to one score in its own way.",
        "Training rewards every episode separately; a measure over a group is a group reward.",
    ),
    # signal and cost
    Code(
        "no-signal",
        MEDIUM,
        "In most groups all rewards are the same, so there is nothing to learn from them.",
        "Change the group size, drop what is always or never solved, or start from easier samples.",
    ),
    Code(
        "solved-by-all",
        LOW,
        "Every attempt at these samples earns the full reward.",
        "Leave them out of training: samples.txt lists the others.",
    ),
    Code(
        "solved-by-none",
        LOW,
        "No attempt at these samples earns anything.",
        "Leave them out for now, or try a stronger model or a larger group.",
    ),
    Code(
        "cut-replies",
        MEDIUM,
        "Many replies are cut at the token limit.",
        "Raise --max-tokens, or ask for shorter replies.",
    ),
    Code(
        "failed-episodes",
        MEDIUM,
        "Episodes in the logs failed.",
        "Open the logs; see which cause they name.",
    ),
    Code(
        "cost",
        INFO,
        "The cost of the task's episodes.",
        "Give --price to see it in money, and --model or --logs for the cost of a real model.",
    ),
    # the audit itself
    Code(
        "budget-spent",
        INFO,
        "The audit stopped before all probes were done.",
        "Run the same command again with a larger --budget: it continues where it stopped.",
    ),
    Code(
        "probe-failed",
        MEDIUM,
        "A probe raised an exception, so its checks are missing.",
        "Report it to the author of the probe, with the exception.",
    ),
)

CODES = {code.name: code for code in _CODES}
"""Every code of the built-in probes, by name."""
