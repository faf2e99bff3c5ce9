//! Scores, selectors and decorators as run files build them.

mod laws;
mod settings;
mod state;
mod support;
mod wraps;
