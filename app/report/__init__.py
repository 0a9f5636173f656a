"""`outrider report`: runs the benchmarks and writes REPORT.md from their JSON."""
