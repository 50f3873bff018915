"""Stand-in until the handler is there."""


def why_not() -> str | None:
    return "this jaxnorm was built without it"
