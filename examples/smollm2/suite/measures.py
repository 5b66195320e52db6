from dressage.authoring import fail_reason, measure, pass_reason, score

FEW, MANY = 12, 60


@measure
def brief(context):
    """Full marks up to 12 words, none from 60 on."""
    words = len(context.final.text.split())
    if words == 0:
        return fail_reason("no answer")
    if words <= FEW:
        return pass_reason(f"{words} words")
    return score(max(0.0, (MANY - words) / (MANY - FEW)), f"{words} words")
