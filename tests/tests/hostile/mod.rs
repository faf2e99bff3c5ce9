//! Hostile input: broken run files, model folders, data files and checkpoints, each refused by the real program with
//! exit code 2 and a message that says what is wrong.
//!
//! A row starts from something that works (the first rows of each table show that it does) and breaks one thing.

pub(crate) mod bench;
mod checkpoints;
mod data;
mod models;
mod runs;
mod tensors;
