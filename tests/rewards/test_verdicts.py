"""What a judge's answer says."""

import pytest

from forge_verifiers.judge import read_verdict

VERDICTS = {
    True: [
        "yes",
        " **Yes.**",
        "Yes. There is no error in it.",
        "Yes, no doubt.",
        "There is no mistake.\n\nYes",
        "Step 2 has no gap.\nVerdict: yes",
        "no\nOn reflection:\nyes",
        "My final answer is: YES.",
        "I find no error. [[yes]]",
        r"\boxed{\text{yes}}",
        "<verdict> yes </verdict>",
        '{"verdict": "yes"}',
        '{\n"reason": "no error",\n"verdict": true\n}',
        '{"correct": True}',
        '```json\n{"correct": "true"}\n```',
        "<think>no, no</think>\nyes",
        "- yes",
        "Decision: yes, since both agree.",
    ],
    False: [
        "No!",
        "No, it is wrong (the right answer is yes).",
        "Yes would be too kind.\nNo",
        "One might say yes.\n**Final verdict**: no.",
        "[[yes]] at first, but [[no]]",
        "The answer is no",
        "yes\n\nno",
        "Judgment - no",
        '{"verdict": false, "reason": "yes?"}',
    ],
    None: [
        "",
        "eyes",
        "nobody",
        "Yes and no.",
        "yes?",
        "There is no error",
        "I cannot say yes",
        "Yes, it holds.\nNo, wait.",
        "yes or no",
        "<think>yes",
        '{"verdict": null}',
        "It is true",
        "It is not clear whether the verdict is yes",
    ],
}


@pytest.mark.parametrize(
    ("verdict", "answer"), [(verdict, text) for verdict, texts in VERDICTS.items() for text in texts]
)
def test_judge_verdict_is_read_from_line_marker_or_first_word(verdict, answer):
    assert read_verdict(answer, "yes", "no") is verdict


def test_judge_verdict_words_are_configurable():
    assert read_verdict("The response is well written.\n[[A]]", "A", "B") is True
    assert read_verdict("Correctness: fine\nincorrect", "correct", "incorrect") is False
    assert read_verdict("It is a correct answer", "correct", "incorrect") is None
    assert read_verdict("a.b", "a.b", "c+") is True
    assert read_verdict('{"reason": "it is false", "match": "false"}', "true", "false") is False
    assert read_verdict('{"match": true, "reason": "no doubt"}', "true", "false") is True
    assert read_verdict("It suggests SUCCESS at first.\nFinal verdict: NOT SUCCESS", "SUCCESS", "NOT SUCCESS") is False
    assert read_verdict("I considered A and B with care. The final grade is B.", "A", "B") is None
    assert read_verdict("I considered A and B with care.\nThe final grade is B.", "A", "B") is False
    assert read_verdict("INCORRECT", "correct", "incorrect") is False
    assert read_verdict("axb", "a.b", "c+") is None
