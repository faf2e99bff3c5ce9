//! The state of an engine by logical element: import, export, hash, and the change of stages in mid-run.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Device, Kind, Tensor};
use zf_sys::storage::slice;

use super::core::lock;
use super::flat::{FlatState, narrow};
use super::{Engine, Stages};
use crate::checkpoint::{DTypeName, MASTER, PARAMETER, Piece, StateHasher};
use crate::loss_scale::{LossScaleState, LossScaler};
use crate::model::UnitSpec;
use crate::stage::Transport;
use crate::weights::Weights;
use crate::{Error, Result};

/// Where a resumed engine reads its state, by logical element.
pub trait StateSource {
    /// Copies elements `range` of the tensor (`name`, `kind`) into `out`.
    ///
    /// # Errors
    /// A missing tensor or damaged file, naming it.
    fn read(&self, name: &str, kind: &str, range: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// Whether the tensor exists.
    fn has(&self, name: &str, kind: &str) -> bool;

    /// Updates made to the parameter `name`.
    fn count(&self, name: &str) -> u64;
}

/// Counters of an engine that a checkpoint keeps beside tensors.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    /// Steps taken, skipped ones included.
    pub step: u64,
    /// Updates made.
    pub updates: u64,
    /// Steps skipped in a row.
    pub skipped_in_a_row: u32,
    /// The loss scaler's state in float16.
    pub loss_scale: Option<LossScaleState>,
}

/// Fills all buffers of `flats` from initial weights, one parameter at a time. Masters start from unrounded values.
pub(crate) fn load_weights(flats: &mut [FlatState], units: &[UnitSpec], weights: &dyn Weights) -> Result<()> {
    for flat in flats {
        for (index, slot) in flat.spec.slots.iter().enumerate() {
            let spec = &units[flat.spec.unit].params[slot.index];
            let values = weights.load(spec)?;
            if values.size() != spec.shape {
                return Err(Error::Input(format!(
                    "`{}` has shape {:?} where {:?} is expected",
                    spec.name,
                    values.size(),
                    spec.shape
                )));
            }
            let values = values.f_to_kind(Kind::Float)?.f_contiguous()?.f_view([-1])?;
            set_parameter(flat, index, &values)?;
        }
    }
    Ok(())
}

/// Sets what this rank keeps of a parameter and owns of its master from its float32 values `[numel]`.
fn set_parameter(flat: &FlatState, slot: usize, values: &Tensor) -> Result<()> {
    let offset = flat.spec.slots[slot].offset;
    let part = |range: &Range<usize>| narrow(values, range.start - offset..range.end - offset);
    for segment in flat.segments(&flat.kept).iter().filter(|segment| segment.slot == slot) {
        flat.param(&segment.range)?.f_copy_(&part(&segment.range)?)?;
    }
    if flat.has_master() {
        for segment in flat.segments(&flat.owned).iter().filter(|segment| segment.slot == slot) {
            flat.master(&segment.range)?.f_copy_(&part(&segment.range)?)?;
        }
    }
    Ok(())
}

/// Sets what this rank owns of optimizer state number `index` of a slot from its values `[numel]`.
fn set_state(flat: &FlatState, slot: usize, index: usize, values: &Tensor) -> Result<()> {
    let offset = flat.spec.slots[slot].offset;
    for segment in flat.segments(&flat.owned).iter().filter(|segment| segment.slot == slot) {
        let part = narrow(values, segment.range.start - offset..segment.range.end - offset)?;
        flat.state(index, &segment.range)?.f_copy_(&part)?;
    }
    Ok(())
}

/// Fills all buffers of `flats` from saved state, reading only what this rank keeps or owns.
pub(crate) fn load_state(flats: &mut [FlatState], kinds: &[&str], source: &dyn StateSource) -> Result<()> {
    for flat in flats {
        for index in 0..flat.spec.slots.len() {
            let (name, offset) = (flat.spec.slots[index].name.clone(), flat.spec.slots[index].offset);
            let read = |kind: &str, range: &Range<usize>| {
                let mut values = vec![0f32; range.len()];
                source.read(&name, kind, range.start - offset..range.end - offset, &mut values)?;
                Ok::<_, Error>(Tensor::f_from_slice(&values)?)
            };
            // A parameter may have been frozen then and not now, or the other way round.
            let (kind, other) = if flat.spec.trainable { (MASTER, PARAMETER) } else { (PARAMETER, MASTER) };
            let kind = if !source.has(&name, kind) && source.has(&name, other) { other } else { kind };
            if flat.spec.slots[index].numel == 0 {
                source.read(&name, kind, 0..0, &mut [])?;
            }
            for segment in flat.segments(&flat.kept).iter().filter(|segment| segment.slot == index) {
                flat.param(&segment.range)?.f_copy_(&read(kind, &segment.range)?)?;
            }
            // Bias correction counts the updates that the moments have seen: new ones start at zero, and so does it.
            let moments = kinds.iter().all(|kind| source.has(&name, kind));
            flat.counts[index] = if moments { source.count(&name) } else { 0 };
            for segment in flat.segments(&flat.owned).iter().filter(|segment| segment.slot == index) {
                if flat.has_master() {
                    flat.master(&segment.range)?.f_copy_(&read(kind, &segment.range)?)?;
                }
                for (state, kind) in kinds.iter().enumerate().take(flat.states.len()) {
                    if source.has(&name, kind) {
                        flat.state(state, &segment.range)?.f_copy_(&read(kind, &segment.range)?)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A tensor of an engine's state: index of flat and slot, name, and index of the optimizer state (`None`: the master or
/// frozen parameter).
struct Logical {
    flat: usize,
    slot: usize,
    name: String,
    kind: &'static str,
    state: Option<usize>,
}

impl Engine {
    /// The parts of the state that this rank saves: every element is saved by exactly one rank. Copies, so that the
    /// next step may begin.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn export(&mut self) -> Result<Vec<Piece>> {
        let kinds = self.stages.optimizer.state();
        let core = &mut *lock(&self.shared);
        core.wait_all_published()?;
        let mut pieces = Vec::new();
        for flat in &core.flats {
            for logical in logical_of(flat, 0, kinds) {
                let spec = &flat.spec.slots[logical.slot];
                let frozen = !flat.spec.trainable;
                let dtype = if frozen { DTypeName::from(flat.spec.dtype) } else { DTypeName::F32 };
                let piece = |range, data| Piece {
                    name: logical.name.clone(),
                    kind: logical.kind.into(),
                    shape: spec.shape.clone(),
                    dtype,
                    range,
                    data,
                };
                if spec.numel == 0 && core.transport.rank() == 0 {
                    // Nobody owns an element of it, and yet a checkpoint has to know it.
                    pieces.push(piece(0..0, Vec::new()));
                }
                for (range, tensor) in parts(flat, &logical)? {
                    let tensor = tensor.f_to_device(Device::Cpu)?;
                    let data = if frozen { raw_bytes(&tensor)? } else { bytes_of(slice::<f32>(&tensor)?) };
                    pieces.push(piece(range.start - spec.offset..range.end - spec.offset, data));
                }
            }
        }
        Ok(pieces)
    }

    /// Updates made to each trainable parameter, by name.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        let core = lock(&self.shared);
        let trainable = core.flats.iter().filter(|flat| flat.spec.trainable);
        trainable
            .flat_map(|flat| flat.spec.slots.iter().zip(&flat.counts).map(|(slot, &count)| (slot.name.clone(), count)))
            .collect()
    }

    /// Counters that a checkpoint keeps beside tensors.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.step,
            updates: self.updates,
            skipped_in_a_row: self.skipped_in_a_row,
            loss_scale: self.scaler.as_ref().map(LossScaler::state),
        }
    }

    /// Puts saved state in the place of the present one.
    ///
    /// # Errors
    /// Those of the source.
    pub fn import(&mut self, source: &dyn StateSource, progress: Progress) -> Result<()> {
        let kinds = self.stages.optimizer.state();
        {
            let core = &mut *lock(&self.shared);
            core.wait_all_published()?;
            tch::no_grad(|| load_state(&mut core.flats, kinds, source))?;
        }
        self.restore(progress)
    }

    /// blake3 over masters, moments and counts in the order of names, independent of the layout; the same on all ranks,
    /// all of which must call it. One logical tensor is gathered at a time.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn state_hash(&mut self) -> Result<String> {
        let counts = self.counts();
        let mut hasher = StateHasher::new();
        self.for_each_logical(&mut |name, kind, values| {
            hasher.add(name, kind, &bytes_of(values));
            Ok(())
        })?;
        counts.iter().for_each(|(name, count)| hasher.add_count(name, *count));
        Ok(hasher.finish())
    }

    /// Calls `f` with every tensor of the state (name, kind, values) in the order of names and kinds, gathered over the
    /// ranks, all of which must call this.
    ///
    /// # Errors
    /// Those of the transport and of `f`.
    pub fn for_each_logical(&mut self, f: &mut dyn FnMut(&str, &str, &[f32]) -> Result<()>) -> Result<()> {
        let kinds = self.stages.optimizer.state();
        let core = &mut *lock(&self.shared);
        core.wait_all_published()?;
        gather_each(&core.flats, kinds, &mut *core.transport, f)
    }

    /// The same training under other stages: the state moves by logical element into the new layout. All ranks must
    /// call it. Optimizer states that the new rule does not share start at zero. Beside the old and the new shards, one
    /// tensor is in memory at a time.
    ///
    /// # Errors
    /// Those of the new stages and of the transport.
    pub fn rebuild(self, stages: Stages) -> Result<Self> {
        let (progress, counts, kinds) = (self.progress(), self.counts(), self.stages.optimizer.state());
        let (parts, transport, old) = self.into_parts()?;
        let mut engine = Self::assemble(parts, stages, transport)?;
        let new_kinds = engine.stages.optimizer.state();
        {
            let core = &mut *lock(&engine.shared);
            let places: BTreeMap<String, (usize, usize)> = core
                .flats
                .iter()
                .enumerate()
                .flat_map(|(flat, state)| {
                    state.spec.slots.iter().enumerate().map(move |(slot, spec)| (spec.name.clone(), (flat, slot)))
                })
                .collect();
            let flats = &core.flats;
            gather_each(&old, kinds, &mut *core.transport, &mut |name, kind, values| {
                let &(flat, slot) =
                    places.get(name).ok_or_else(|| Error::Engine(format!("no place for the state of `{name}`")))?;
                let values = Tensor::f_from_slice(values)?;
                match new_kinds.iter().position(|known| *known == kind) {
                    _ if kind == MASTER || kind == PARAMETER => set_parameter(&flats[flat], slot, &values),
                    Some(index) if flats[flat].spec.trainable => set_state(&flats[flat], slot, index, &values),
                    _ => Ok(()),
                }
            })?;
            // Bias correction counts the updates that the moments have seen.
            let shared = new_kinds.iter().all(|kind| kinds.contains(kind));
            for flat in core.flats.iter_mut().filter(|_| shared) {
                for (slot, count) in flat.spec.slots.iter().zip(&mut flat.counts) {
                    *count = counts.get(&slot.name).copied().unwrap_or(0);
                }
            }
        }
        engine.restore(progress)?;
        Ok(engine)
    }

    /// Puts saved counters in the place of the present ones.
    fn restore(&mut self, progress: Progress) -> Result<()> {
        self.step = progress.step;
        self.updates = progress.updates;
        self.skipped_in_a_row = progress.skipped_in_a_row;
        if let (Some(scaler), Some(state)) = (&mut self.scaler, progress.loss_scale) {
            scaler.restore(state)?;
        }
        Ok(())
    }
}

/// Calls `f` with every tensor of the state of `flats` in the order of names and kinds, gathered over all ranks.
fn gather_each(
    flats: &[FlatState],
    kinds: &'static [&'static str],
    transport: &mut dyn Transport,
    f: &mut dyn FnMut(&str, &str, &[f32]) -> Result<()>,
) -> Result<()> {
    let mut all: Vec<Logical> =
        flats.iter().enumerate().flat_map(|(index, flat)| logical_of(flat, index, kinds)).collect();
    all.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
    for logical in all {
        let flat = &flats[logical.flat];
        let spec = &flat.spec.slots[logical.slot];
        let (offset, mut values) = (spec.offset, vec![0f32; spec.numel]);
        let mut mine = Vec::new();
        for (range, tensor) in parts(flat, &logical)? {
            let tensor = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
            mine.extend(((range.start - offset) as u64).to_le_bytes());
            mine.extend((range.len() as u64).to_le_bytes());
            mine.extend(bytes_of(slice::<f32>(&tensor)?));
        }
        let label = format!("state of {}", logical.name);
        for (rank, bytes) in transport.exchange(&label, mine)?.iter().enumerate() {
            scatter(bytes, &mut values)
                .ok_or_else(|| Error::comm(format!("rank {rank} sent a garbled piece of {}", logical.name)))?;
        }
        f(&logical.name, logical.kind, &values)?;
    }
    Ok(())
}

/// The tensors of a flat's state.
fn logical_of(flat: &FlatState, index: usize, kinds: &'static [&'static str]) -> Vec<Logical> {
    let mut all = Vec::new();
    for (slot, spec) in flat.spec.slots.iter().enumerate() {
        let logical = |kind, state| Logical { flat: index, slot, name: spec.name.clone(), kind, state };
        if flat.spec.trainable {
            all.push(logical(MASTER, None));
            all.extend(kinds.iter().enumerate().map(|(state, kind)| logical(kind, Some(state))));
        } else {
            all.push(logical(PARAMETER, None));
        }
    }
    all
}

/// The parts of a tensor that this rank saves, by element of the flat buffer.
fn parts(flat: &FlatState, logical: &Logical) -> Result<Vec<(Range<usize>, Tensor)>> {
    let saved = flat.segments(&flat.reduction.summed);
    let parts = saved.into_iter().filter(|segment| segment.slot == logical.slot).map(|segment| {
        let tensor = match logical.state {
            None if !flat.spec.trainable => flat.param(&segment.range)?,
            None => flat.master(&segment.range)?,
            Some(state) => flat.state(state, &segment.range)?,
        };
        Ok((segment.range, tensor))
    });
    parts.collect()
}

/// Little-endian bytes of float32 values.
fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Bytes of a contiguous CPU tensor of any type.
fn raw_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

/// Puts the pieces of another rank in place; `None` if they are garbled.
fn scatter(mut bytes: &[u8], values: &mut [f32]) -> Option<()> {
    while !bytes.is_empty() {
        let (start, rest) = bytes.split_first_chunk::<8>()?;
        let (len, rest) = rest.split_first_chunk::<8>()?;
        let start = usize::try_from(u64::from_le_bytes(*start)).ok()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (data, rest) = rest.split_at_checked(len.checked_mul(4)?)?;
        let target = values.get_mut(start..start.checked_add(len)?)?;
        for (value, chunk) in target.iter_mut().zip(data.as_chunks::<4>().0) {
            *value = f32::from_le_bytes(*chunk);
        }
        bytes = rest;
    }
    Some(())
}
