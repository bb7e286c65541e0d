"""What calls are given and give: records, columns on ranks, and rows in chunks."""
