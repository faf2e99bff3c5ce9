//! Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::norm::{Kernel, Level};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{GroupRule, HostSlice, Hyper, Optimizer, OptimizerBase, Out, TensorSlice};

use crate::checks;
use crate::round::Round;

/// Settings of Lion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LionConfig {
    /// Learning rate, before the schedule: the size of every element's step. The paper advises a third to a tenth of
    /// AdamW's.
    pub lr: f64,
    /// Weights of the momentum in the direction of the step and in the new momentum, each in [0, 1).
    pub betas: [f64; 2],
    /// Weight decay of parameters with two or more dimensions, unless groups say otherwise; times lr, apart from the
    /// gradient. As lr is smaller than AdamW's, the paper advises three to ten times AdamW's.
    pub weight_decay: f64,
    /// Other settings for some parameters; the first group that matches a name applies.
    pub groups: Vec<GroupRule>,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: [0.9, 0.99], weight_decay: 1.0, groups: Vec::new() }
    }
}

impl LionConfig {
    /// The rule.
    ///
    /// # Errors
    /// The first setting out of range, with its key.
    pub fn rule(self) -> anyhow::Result<Lion> {
        checks::base(self.lr, self.weight_decay, &self.groups)?;
        checks::betas(self.betas)?;
        Ok(Lion {
            base: OptimizerBase { lr: self.lr, weight_decay: self.weight_decay, groups: self.groups },
            betas: self.betas,
        })
    }
}

impl Build<slots::Optim> for LionConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Optimizer>> {
        Ok(Arc::new(self.rule()?))
    }
}

zf_core::register!(
    slots::Optim,
    "lion",
    LionConfig,
    "Lion: the sign of a momentum, with decoupled weight decay",
    "lr = 1e-4\nbetas = [0.9, 0.99]\nweight_decay = 1.0"
);

/// Lion. State: `exp_avg` (m).
///
/// With the scalars computed in float64 and rounded once to float32, this sequence of single float32 operations, none of
/// them fused:
///
/// ```text
/// g = grad * grad_scale
/// p = p * (1 - lr wd)
/// c = m * b1 + g * (1 - b1)
/// m = m * b2 + g * (1 - b2)
/// p = p - (sign(c) * lr + c * 0)
/// ```
///
/// The sign of zero is zero. The term `c * 0` is zero for every finite c and NaN for every other, whose sign alone would
/// hide it.
#[derive(Debug, Clone, PartialEq)]
pub struct Lion {
    base: OptimizerBase,
    betas: [f64; 2],
}

impl Optimizer for Lion {
    fn base(&self) -> &OptimizerBase {
        &self.base
    }

    fn state(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.apply_at(Level::detect(), slice, hyper)
    }

    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        let c = self.scalars(hyper);
        let scalar = |x: f32| tch::Scalar::from(f64::from(x));
        checks::pieces::<1>("lion", slice, |slice| {
            let _guard = tch::no_grad_guard();
            let (mut p, mut m) = (slice.master.shallow_clone(), slice.state[0].shallow_clone());
            let mut g = slice.grad.f_mul_scalar(scalar(c.grad_scale))?;
            let _ = p.f_mul_scalar_(scalar(c.decay))?;
            let mut t = m.f_mul_scalar(scalar(c.b1))?;
            let _ = t.f_add_(&g.f_mul_scalar(scalar(c.one_minus_b1))?)?;
            let _ = m.f_mul_scalar_(scalar(c.b2))?;
            let _ = g.f_mul_scalar_(scalar(c.one_minus_b2))?;
            let _ = m.f_add_(&g)?;
            let mut u = t.f_sign_out(&g)?;
            let _ = u.f_mul_scalar_(scalar(c.lr))?;
            let _ = t.f_mul_scalar_(scalar(0.0))?;
            let _ = u.f_add_(&t)?;
            let _ = p.f_sub_(&u)?;
            if let Some(out) = slice.out {
                out.shallow_clone().f_copy_(&p)?;
            }
            Ok(())
        })
    }
}

impl Lion {
    /// [`Optimizer::apply`] with a given instruction set.
    fn apply_at(&self, level: Level, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        let scalars = self.scalars(hyper);
        let (master, grad, [m], out) = checks::host::<1>("lion", slice)?;
        let mut none = vec![(); master.len()];
        macro_rules! update {
            ($out:expr) => {
                level.run(Update { master, grad, m, out: $out, scalars })
            };
        }
        match out {
            Out::None => update!(&mut none[..]),
            Out::Bf16(out) => update!(out),
            Out::F16(out) => update!(out),
        }
        Ok(())
    }

    fn scalars(&self, hyper: &Hyper) -> Scalars {
        let [b1, b2] = self.betas;
        Scalars {
            grad_scale: hyper.grad_scale,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            b1: b1 as f32,
            one_minus_b1: (1.0 - b1) as f32,
            b2: b2 as f32,
            one_minus_b2: (1.0 - b2) as f32,
            lr: hyper.lr as f32,
        }
    }
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    decay: f32,
    b1: f32,
    one_minus_b1: f32,
    b2: f32,
    one_minus_b2: f32,
    lr: f32,
}

struct Update<'a, R> {
    master: &'a mut [f32],
    grad: &'a [f32],
    m: &'a mut [f32],
    out: &'a mut [R],
    scalars: Scalars,
}

impl<R: Round> Kernel for Update<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        update(self.master, self.grad, self.m, self.out, self.scalars);
    }
}

/// The loop. As arguments the slices are known not to overlap, which as fields they are not.
#[inline(always)]
fn update<R: Round>(master: &mut [f32], grad: &[f32], m: &mut [f32], out: &mut [R], c: Scalars) {
    let n = master.len();
    let (grad, m, out) = (&grad[..n], &mut m[..n], &mut out[..n]);
    for i in 0..n {
        let g = grad[i] * c.grad_scale;
        let p = master[i] * c.decay;
        let t = m[i] * c.b1 + g * c.one_minus_b1;
        m[i] = m[i] * c.b2 + g * c.one_minus_b2;
        // Two selections and a difference, which need no branch.
        let sign = if t > 0.0 { 1.0 } else { 0.0 } - if t < 0.0 { 1.0 } else { 0.0 };
        let p = p - (sign * c.lr + t * 0.0);
        master[i] = p;
        out[i] = R::round(p);
    }
}

#[cfg(test)]
mod tests;
