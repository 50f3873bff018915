"""How jaxnorm was built, and what runs for a given array: `python -m jaxnorm.info [--json]`."""

from jaxnorm.inspect.report import call, in_words, main, native_modules, plan_in_words, versions

__all__ = ["call", "in_words", "main", "native_modules", "plan_in_words", "versions"]

if __name__ == "__main__":
    main()
