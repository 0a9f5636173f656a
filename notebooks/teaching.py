"""What the lessons share, under the name by which lessons that were saved before import it."""

from outrider.app.lessons import *  # noqa: F403
