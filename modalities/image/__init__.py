"""Images as tokens on a grid."""
