"""Pure torch components, one file an axis, each level a spec with its module beside it."""
