//! Tests of models and folders against numbers of another implementation.

mod export;
mod golden;
mod hostile;
mod model;
