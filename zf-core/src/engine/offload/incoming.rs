//! Columns that became chosen, on their way from the host.
//!
//! Their states cross the link while the next forward pass goes on, which waits for those of a unit when it comes to it. Until
//! then their update of the step that chose them waits here, with its gradients.

use std::ops::Range;
use std::time::Instant;

use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};

use super::Offloading;
use super::columns::total;
use crate::engine::core::Core;
use crate::engine::flat::{int, narrow};
use crate::stage::{Hyper, Take};
use crate::{Error, Result};

/// Columns of one flat buffer of which this rank's states have not arrived.
#[derive(Debug)]
pub(super) struct Incoming {
    /// This rank's elements, in column order.
    ranges: Vec<Range<usize>>,
    /// The last window of which the update was submitted before they were asked for.
    window: u64,
    /// What is to be done with them as soon as they are here.
    update: Option<Delayed>,
}

/// An update of some elements.
#[derive(Debug)]
struct Delayed {
    ranges: Vec<Range<usize>>,
    /// Which of the elements, one after the other, are updated alike.
    alike: Vec<(usize, Hyper)>,
    /// Their gradients, float32.
    grads: Tensor,
}

impl Incoming {
    /// Whether a range that does not cross the edge of a column is on the way.
    pub(super) fn has(&self, range: &Range<usize>) -> bool {
        let at = self.ranges.partition_point(|own| own.end <= range.start);
        self.ranges.get(at).is_some_and(|own| own.start <= range.start)
    }

    /// Keeps an update until the states are here: of `ranges`, of which `alike` says what is updated alike.
    pub(super) fn put_off(&mut self, ranges: Vec<Range<usize>>, alike: Vec<(usize, Hyper)>, grads: Tensor) {
        self.update = Some(Delayed { ranges, alike, grads });
    }
}

impl Offloading {
    /// Has the host send the states of elements (column order) that become chosen, with their pending gradients if `late`.
    pub(super) fn ask_for(&mut self, core: &Core, flat: usize, ranges: &[Range<usize>], late: bool) -> Result<()> {
        let Some(part) = self.parts[flat].as_mut().filter(|_| !ranges.is_empty()) else { return Ok(()) };
        let arrays = 1 + self.optimizer.state().len() + usize::from(late);
        let into = {
            let _tag = tag(Category::Buffers);
            Tensor::f_empty([int(arrays * total(ranges))?], (Kind::Float, core.device()))?
        };
        self.pool.take(Take { buffer: flat, ranges: ranges.to_vec(), late, into })?;
        let window = self.clock.window.saturating_sub(1);
        part.incoming = Some(Incoming { ranges: ranges.to_vec(), window, update: None });
        Ok(())
    }

    /// Waits for the states of a flat buffer's promoted columns, of which none is there yet, and makes the update that waited for
    /// them. Their pending gradients, where those were asked for.
    pub(super) fn receive_columns(&mut self, core: &Core, flat: usize) -> Result<Option<Tensor>> {
        let Some(incoming) = self.parts[flat].as_mut().and_then(|part| part.incoming.take()) else { return Ok(None) };
        self.pump()?;
        // Their pending update needs gradients that may not have left.
        self.outbox.pack_until(incoming.window, &mut *self.pool, &self.link, &core.trace)?;
        let started = Instant::now();
        let taken = {
            let unit = &core.layout.units[core.flats[flat].spec.unit].name;
            let _wait = core.trace.wait("wait", format!("the host to hand columns of {unit} over"));
            self.pool.taken()?
        };
        self.waited += started.elapsed();
        if taken.buffer != flat {
            return Err(Error::Engine(format!("columns of buffer {} came in place of buffer {flat}", taken.buffer)));
        }
        self.withdraw(flat, incoming.window, taken.withdrawn)?;
        let Some(part) = &mut self.parts[flat] else { return Ok(None) };
        let (len, arrays) = (total(&incoming.ranges), part.device.arrays.len());
        let values = |array: usize| narrow(&taken.values, array * len..(array + 1) * len);
        for array in 0..arrays {
            part.device.put(&part.split, &incoming.ranges, array, &values(array)?)?;
        }
        tch::no_grad(|| {
            part.device.publish(&core.flats[flat], &part.split, &incoming.ranges)?;
            let Some(Delayed { ranges, alike, grads }) = &incoming.update else { return Ok(()) };
            part.device.update(&core.flats[flat], &part.split, &*self.optimizer, (ranges, alike), grads)
        })?;
        (taken.values.numel() > arrays * len).then(|| values(arrays)).transpose()
    }

    /// Elements whose update was not made when they were taken: their parameters will not arrive.
    fn withdraw(&mut self, flat: usize, window: u64, withdrawn: usize) -> Result<()> {
        // The update that was pending then may be the one that arrives now.
        let pending = self.pending.as_mut().filter(|pending| pending.window == window);
        let expected = &mut pending.unwrap_or(&mut self.arriving).elements[flat];
        *expected = expected.checked_sub(withdrawn).ok_or_else(|| {
            Error::Engine(format!(
                "the host withdrew {withdrawn} parameters of buffer {flat}, of which {expected} were to come"
            ))
        })?;
        Ok(())
    }
}
