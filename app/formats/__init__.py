"""What other engines report about speculative decoding, read as traces and summaries; and AIPerf's record, written."""
