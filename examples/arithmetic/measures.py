import re

from dressage.authoring import fail_reason, measure, pass_reason


@measure
def correct_answer(context):
    """The last number of the final message is the expected one."""
    numbers = re.findall(r"-?\d+", context.final.text)
    if not numbers:
        return fail_reason("the final message has no number")
    if numbers[-1] != context.expect["answer"]:
        return fail_reason(f"answered {numbers[-1]}, expected {context.expect['answer']}")
    return pass_reason("right number")
