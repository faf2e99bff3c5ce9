//! Applies the update rule to what this rank owns.

use std::ops::Range;

use half::{bf16, f16};
use tch::{Kind, Tensor};
use zf_sys::storage::{slice, slice_mut};

use super::flat::{FlatState, Segment};
use super::tensor_sums::TensorSums;
use crate::layout::DType;
use crate::stage::{GroupRule, HostSlice, Hyper, Optimizer, OptimizerBase, Out, TensorSlice};
use crate::{Error, Result};

/// Base rate and decay of one parameter, its group's if a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SlotHyper {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
}

/// Resolves the group of a parameter. Decay applies to parameters with two or more dimensions unless a group says
/// otherwise.
pub(crate) fn slot_hyper(base: &OptimizerBase, name: &str, shape: &[i64]) -> SlotHyper {
    let rule = base.groups.iter().find(|rule| rule.matches(name));
    let decay = if shape.len() >= 2 { base.weight_decay } else { 0.0 };
    SlotHyper {
        lr: rule.and_then(|rule| rule.lr).unwrap_or(base.lr),
        weight_decay: rule.and_then(|rule| rule.weight_decay).unwrap_or(decay),
    }
}

impl GroupRule {
    /// Whether the rule applies to the parameter `name`: it contains the pattern, or, where the pattern has a `*`, the
    /// whole name matches with each `*` standing for any run of characters.
    pub fn matches(&self, name: &str) -> bool {
        if !self.pattern.contains('*') {
            return name.contains(&self.pattern);
        }
        let mut parts = self.pattern.split('*');
        let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or("")) else { return false };
        let parts: Vec<&str> = parts.collect();
        let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
        for part in middle {
            let Some(found) = rest.find(part) else { return false };
            rest = &rest[found + part.len()..];
        }
        rest.ends_with(last)
    }
}

/// The update of one flat in this step.
pub(crate) struct Update<'a> {
    /// Index of the flat.
    pub(crate) flat: usize,
    /// By slot: whether it is updated.
    pub(crate) chosen: Vec<bool>,
    /// By slot.
    pub(crate) hypers: &'a [SlotHyper],
    /// The schedule's factor.
    pub(crate) lr: f64,
    /// Unscales and clips.
    pub(crate) grad_scale: f32,
}

impl Update<'_> {
    /// The parts within `ranges` of the parameters that are updated.
    pub(crate) fn segments(&self, flat: &FlatState, ranges: &[Range<usize>]) -> Vec<Segment> {
        let mut segments = flat.segments(ranges);
        segments.retain(|segment| self.chosen[segment.slot]);
        segments
    }

    /// The numbers for one parameter, whose updates were counted.
    pub(crate) fn hyper(&self, flat: &FlatState, slot: usize) -> Hyper {
        let SlotHyper { lr, weight_decay } = self.hypers[slot];
        Hyper { lr: lr * self.lr, weight_decay, count: flat.counts[slot], grad_scale: self.grad_scale }
    }

    /// Applies the rule to what this rank owns.
    pub(crate) fn apply(&self, flat: &FlatState, optimizer: &dyn Optimizer, sums: &TensorSums) -> Result<()> {
        for segment in self.segments(flat, &flat.owned) {
            let hyper = self.hyper(flat, segment.slot);
            let sums = sums.of(self.flat, segment.slot);
            if flat.device().is_cuda() {
                on_device(flat, &segment, optimizer, &hyper, sums)?;
            } else {
                on_host(flat, &segment, sums, &mut |slice| optimizer.apply(slice, &hyper))?;
            }
        }
        Ok(())
    }
}

/// Hands the rule a range in host memory.
pub(crate) fn on_host(
    flat: &FlatState,
    segment: &Segment,
    sums: &[f64],
    rule: &mut dyn FnMut(&mut HostSlice<'_>) -> Result<()>,
) -> Result<()> {
    let master = flat.master(&segment.range)?;
    let grad = flat.grad(&segment.range)?.f_to_kind(Kind::Float)?;
    let states = states(flat, segment)?;
    let rounded = flat.param(&segment.range)?;
    // SAFETY: master, states and rounded parameter are different memory (the rounded parameter is only used where the
    // master is a buffer of its own), owned by this rank, and between the last backward and the next forward nothing
    // else reads or writes them: collectives on them are issued after the update and waited for before the next one.
    let mut slice = unsafe {
        HostSlice {
            master: slice_mut::<f32>(&master)?,
            grad: slice::<f32>(&grad)?,
            state: states.iter().map(|state| slice_mut::<f32>(state)).collect::<zf_sys::Result<_>>()?,
            out: match flat.spec.dtype {
                _ if !flat.has_master() => Out::None,
                DType::Bfloat16 => Out::Bf16(slice_mut::<bf16>(&rounded)?),
                DType::Float16 => Out::F16(slice_mut::<f16>(&rounded)?),
                DType::Float32 => Out::None,
            },
            sums,
            shape: &flat.spec.slots[segment.slot].shape,
        }
    };
    rule(&mut slice)
}

fn on_device(
    flat: &FlatState,
    segment: &Segment,
    optimizer: &dyn Optimizer,
    hyper: &Hyper,
    sums: &[f64],
) -> Result<()> {
    let rounded = flat.has_master().then(|| flat.param(&segment.range)).transpose()?;
    let slice = TensorSlice {
        master: &flat.master(&segment.range)?,
        grad: &flat.grad(&segment.range)?.f_to_kind(Kind::Float)?,
        state: &states(flat, segment)?,
        out: rounded.as_ref(),
        sums,
        shape: &flat.spec.slots[segment.slot].shape,
    };
    tch::no_grad(|| optimizer.apply_tensor(&slice, hyper))
}

fn states(flat: &FlatState, segment: &Segment) -> Result<Vec<Tensor>> {
    (0..flat.states.len()).map(|index| flat.state(index, &segment.range)).collect()
}

/// Refuses groups that match no parameter: a setting without effect is an error.
pub(crate) fn check_groups<'a>(base: &OptimizerBase, names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
    for rule in &base.groups {
        if !names.clone().any(|name| rule.matches(name)) {
            return Err(Error::Config(format!(
                "optimizer group `match = \"{}\"` matches no parameter of the model",
                rule.pattern
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pattern: &str, name: &str, expected: bool) {
        let rule = GroupRule { pattern: pattern.into(), ..GroupRule::default() };
        assert_eq!(rule.matches(name), expected, "`{pattern}` on `{name}`");
    }

    #[test]
    fn patterns_match_parts_or_whole_names() {
        check("norm", "model.layers.0.input_layernorm.weight", true);
        check("bias", "model.norm.weight", false);
        check("*.bias", "h.0.ln_1.bias", true);
        check("*.bias", "h.0.bias.weight", false);
        check("model.*.weight", "model.a.b.weight", true);
        check("model.*.weight", "a.model.b.weight", false);
        check("*", "anything", true);
        check("a*a", "a", false);
        check("layers.*.mlp.*.weight", "layers.3.mlp.up.weight", true);
    }

    #[test]
    fn decay_follows_dimensions_unless_a_group_says_otherwise() {
        let groups = vec![GroupRule { pattern: "embed".into(), weight_decay: Some(0.0), ..GroupRule::default() }];
        let base = OptimizerBase { lr: 1.0, weight_decay: 0.1, groups };
        assert_eq!(slot_hyper(&base, "w", &[2, 2]).weight_decay, 0.1);
        assert_eq!(slot_hyper(&base, "norm", &[2]).weight_decay, 0.0);
        assert_eq!(slot_hyper(&base, "embed.weight", &[2, 2]).weight_decay, 0.0);
        assert!(check_groups(&base, ["w"].into_iter()).is_err());
    }
}
