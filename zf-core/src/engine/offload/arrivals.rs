//! Updated parameters on their way back, received unit by unit before the forward pass that is to see them.

use std::ops::Range;
use std::time::Instant;

use tch::Tensor;

use super::columns::total;
use super::device_part::write_parameters;
use super::{Offloading, Part};
use crate::engine::core::Core;
use crate::engine::flat::{int, narrow};
use crate::stage::Output;
use crate::{Error, Result};

/// What of an update is to come, by flat.
#[derive(Debug, Clone, Default)]
pub(super) struct Expected {
    /// Window of the newest update: its gradients leave before anybody waits for it.
    pub(super) window: u64,
    /// Elements of this rank.
    pub(super) elements: Vec<usize>,
    /// Whether any rank has some. It decides when the flat is sent on to the others, at which all ranks take part.
    pub(super) anywhere: Vec<bool>,
}

impl Expected {
    pub(super) fn nothing(flats: usize) -> Self {
        Self { window: 0, elements: vec![0; flats], anywhere: vec![false; flats] }
    }

    pub(super) fn add(&mut self, more: &Self) {
        self.window = more.window;
        self.elements.iter_mut().zip(&more.elements).for_each(|(sum, more)| *sum += more);
        self.anywhere.iter_mut().zip(&more.anywhere).for_each(|(any, more)| *any |= more);
    }
}

impl Offloading {
    /// Waits for the parameters and promoted columns of a flat buffer and sends them on to the other ranks. Outputs come in the order of flat
    /// buffers, so that those before it are received too. All ranks send on the same flats in the same order, also one that
    /// has nothing of a flat itself.
    pub(crate) fn receive(&mut self, core: &mut Core, flat: usize) -> Result<()> {
        for flat in 0..=flat {
            self.receive_columns(core, flat)?;
            self.receive_parameters(core, flat)?;
            if std::mem::take(&mut self.arriving.anywhere[flat]) {
                core.publish(flat)?;
            }
        }
        Ok(())
    }

    fn receive_parameters(&mut self, core: &Core, flat: usize) -> Result<()> {
        if self.arriving.elements[flat] > 0 {
            self.outbox.pack_until(self.arriving.window, &mut *self.pool, &self.link, &core.trace)?;
        }
        while self.arriving.elements[flat] > 0 {
            self.pump()?;
            let started = Instant::now();
            let output = {
                let unit = &core.layout.units[core.flats[flat].spec.unit].name;
                let _wait = core.trace.wait("wait", format!("the host to update {unit}"));
                self.pool.output()?
            };
            self.waited += started.elapsed();
            self.take_in(core, output)?;
        }
        Ok(())
    }

    /// Waits for everything that is to arrive.
    pub(crate) fn receive_all(&mut self, core: &mut Core) -> Result<()> {
        (0..self.parts.len()).try_for_each(|flat| self.receive(core, flat))
    }

    /// Writes the parameters of an output, except those of columns that have moved to the device since.
    fn take_in(&mut self, core: &Core, output: Output) -> Result<()> {
        let Output { buffer, ranges, values } = output;
        let (Some(flat), Some(Some(Part { split, .. }))) = (core.flats.get(buffer), self.parts.get(buffer)) else {
            return Err(Error::Engine(format!("the host sent parameters of a buffer number {buffer}")));
        };
        let len = total(&ranges);
        let Some(rest) = self.arriving.elements[buffer].checked_sub(len) else {
            return Err(Error::Engine(format!(
                "the host sent {len} parameters where {} were expected",
                self.arriving.elements[buffer]
            )));
        };
        let kind = flat.spec.dtype.kind();
        let bytes = int(len * kind.elt_size_in_bytes())?;
        let typed = values.f_narrow(0, 0, bytes)?.f_view_dtype(kind)?;
        let wanted = split.still_with_host(&ranges);
        if wanted.iter().map(|(range, _)| range.len()).sum::<usize>() == len {
            write_parameters(flat, split, &ranges, &typed)?;
        } else if !wanted.is_empty() {
            let pieces = wanted.iter().map(|(range, at)| narrow(&typed, *at..at + range.len()));
            let values = Tensor::f_cat(&pieces.collect::<Result<Vec<_>>>()?, 0)?;
            let ranges: Vec<Range<usize>> = wanted.into_iter().map(|(range, _)| range).collect();
            write_parameters(flat, split, &ranges, &values)?;
        }
        drop(typed);
        self.arriving.elements[buffer] = rest;
        self.pool.recycle(values);
        Ok(())
    }
}
