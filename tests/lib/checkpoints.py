"""Files of Orbax."""

import orbax.checkpoint


def through_checkpoint(directory, saved, target):
    """What Orbax restores, of the shapes of `target`."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "checkpoint", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "checkpoint", target)
