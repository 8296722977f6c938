"""What a launch that must fail says."""

import pytest


def refusal(launch, *args):
    """Text of what `launch(*args)` raises, causes included: a compiler's error names the line, its cause says why."""
    with pytest.raises(Exception) as info:
        launch(*args)
    error, text = info.value, ""
    while error:
        text, error = f"{text}{type(error).__name__}: {error}\n", error.__cause__ or error.__context__
    return text
