//! One module a command, each a library function.

pub mod ablate;
pub mod compare;
pub mod completions;
pub mod doctor;
pub mod eval;
pub mod explain;
pub mod export;
pub mod generate;
pub mod inspect;
pub mod launch;
pub mod plan;
pub(crate) mod size;
pub mod stages;
pub mod timeline;
pub mod train;
