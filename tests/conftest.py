"""Before any test imports torch."""

from pvg.spinning import bound_spinning

bound_spinning()
