"""Workers on ranks: processes of the plan's pools, reached by calls and made again when lost."""
