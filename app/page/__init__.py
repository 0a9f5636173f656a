"""The Gradio page: its tabs, the backends behind them, and the queue that model runs wait in."""
