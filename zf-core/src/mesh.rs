//! The mesh: ranks arranged along named axes.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// One named axis of a [`Mesh`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// `data`, later `tensor`.
    pub name: String,
    /// How many ranks lie along it, at least 1.
    pub size: usize,
}

/// Ranks arranged along named axes, the last axis varying fastest.
///
/// So far one axis, `data`, holds all ranks; strategies ask for sizes and groups by the axis's name, so that further
/// axes change no strategy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    axes: Vec<Axis>,
    node: usize,
}

impl Mesh {
    /// A mesh with the one axis `data` of `ranks` ranks.
    pub fn data(ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::Config("a mesh needs at least one rank, found 0".into()));
        }
        Ok(Self { axes: vec![Axis { name: "data".into(), size: ranks }], node: ranks })
    }

    /// The same mesh on machines of `ranks` consecutive ranks each.
    ///
    /// # Errors
    /// When `ranks` does not divide the world.
    pub fn with_node(mut self, ranks: usize) -> Result<Self> {
        if ranks == 0 || !self.world().is_multiple_of(ranks) {
            return Err(Error::Config(format!(
                "transport.ranks_per_node = {ranks} does not divide the world of {} ranks",
                self.world()
            )));
        }
        self.node = ranks;
        Ok(self)
    }

    /// Consecutive ranks that share a machine.
    pub fn node(&self) -> usize {
        self.node
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// All ranks.
    pub fn world(&self) -> usize {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Ranks along the axis `name`; 1 where there is no such axis.
    pub fn size(&self, name: &str) -> usize {
        self.axes.iter().find(|axis| axis.name == name).map_or(1, |axis| axis.size)
    }
}
