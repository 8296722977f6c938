"""What the stand-ins were asked for, in order; and what the test wants them to answer."""

calls = []  # (function, arguments)
answers = {}  # function -> the code that it returns, or the exception that it raises, in place of its work


def reset(**planned):
    calls.clear()
    answers.clear()
    answers.update(planned)


def names():
    return [name for name, _ in calls]


def recorded(function):
    """A stand-in's function that records its calls and gives the planned answer."""

    def call(*args, **kwargs):
        said = args + tuple(kwargs.items())
        calls.append((function.__name__, tuple(str(one) if type(one).__name__ == "device" else one for one in said)))
        if function.__name__ in answers:
            answer = answers[function.__name__]
            if isinstance(answer, Exception):
                raise answer
            return answer
        return function(*args, **kwargs)

    return call
