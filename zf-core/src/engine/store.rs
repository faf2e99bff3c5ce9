//! Masters and optimizer states, wherever they are.

use std::ops::Range;

use tch::Tensor;

use super::flat::FlatState;
use super::offload::Offloading;
use crate::Result;

/// Number of the array of masters; states follow in the rule's order.
pub(crate) const MASTERS: usize = 0;

/// Access to the states of all flat buffers: beside the parameters, or off the device.
pub(crate) struct Store<'a> {
    pub(crate) flats: &'a [FlatState],
    pub(crate) offload: Option<&'a mut Offloading>,
}

impl Store<'_> {
    /// Whether masters are kept apart from the parameters.
    pub(crate) fn has_master(&self, flat: usize) -> bool {
        self.flats[flat].has_master() || self.offload.as_ref().is_some_and(|offload| offload.holds(flat))
    }

    /// Arrays of a flat buffer's trained parameters beside the masters.
    pub(crate) fn states(&self, flat: usize) -> usize {
        match &self.offload {
            Some(offload) if offload.holds(flat) => offload.states(),
            _ => self.flats[flat].states.len(),
        }
    }

    /// Elements `range`, which this rank owns, of an array.
    pub(crate) fn read(&mut self, flat: usize, array: usize, range: &Range<usize>) -> Result<Tensor> {
        match &mut self.offload {
            Some(offload) if offload.holds(flat) => offload.read(flat, array, range),
            _ if array == MASTERS => self.flats[flat].master(range),
            _ => self.flats[flat].state(array - 1, range),
        }
    }

    /// Replaces elements `range`, which are all that this rank owns of a parameter in one piece.
    pub(crate) fn write(&mut self, flat: usize, array: usize, range: &Range<usize>, values: &Tensor) -> Result<()> {
        match &mut self.offload {
            Some(offload) if offload.holds(flat) => offload.write(flat, array, range, values),
            _ if array == MASTERS => Ok(self.flats[flat].master(range)?.f_copy_(values)?),
            _ => Ok(self.flats[flat].state(array - 1, range)?.f_copy_(values)?),
        }
    }
}
