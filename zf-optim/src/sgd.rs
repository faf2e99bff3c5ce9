//! Stochastic gradient descent with momentum (Polyak), in the form of `torch.optim.SGD`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::norm::{Kernel, Level};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{GroupRule, HostSlice, Hyper, Optimizer, OptimizerBase, Out, TensorSlice};

use crate::checks::{self, require};
use crate::round::Round;

/// Settings of SGD.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SgdConfig {
    /// Learning rate, before the schedule.
    pub lr: f64,
    /// Momentum, in [0, 1). 0 keeps no buffer.
    pub momentum: f64,
    /// Weight decay of parameters with two or more dimensions, unless groups say otherwise; added to the gradient.
    pub weight_decay: f64,
    /// Other settings for some parameters; the first group that matches a name applies.
    pub groups: Vec<GroupRule>,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.9, weight_decay: 0.0, groups: Vec::new() }
    }
}

impl SgdConfig {
    /// The rule.
    ///
    /// # Errors
    /// The first setting out of range, with its key.
    pub fn rule(self) -> anyhow::Result<Sgd> {
        checks::base(self.lr, self.weight_decay, &self.groups)?;
        require((0.0..1.0).contains(&self.momentum), "momentum", "from 0 to below 1", self.momentum)?;
        Ok(Sgd {
            base: OptimizerBase { lr: self.lr, weight_decay: self.weight_decay, groups: self.groups },
            momentum: self.momentum,
        })
    }
}

impl Build<slots::Optim> for SgdConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Optimizer>> {
        Ok(Arc::new(self.rule()?))
    }
}

zf_core::register!(
    slots::Optim,
    "sgd",
    SgdConfig,
    "stochastic gradient descent with momentum",
    "lr = 0.05\nmomentum = 0.9"
);

/// SGD with momentum. State: `momentum_buffer`; none with momentum 0.
///
/// With the scalars rounded to float32, this sequence of single float32 operations, none of them fused:
///
/// ```text
/// g = grad * grad_scale
/// g = g + p * wd              only where wd is not 0
/// b = b * momentum + g        only where momentum is not 0
/// p = p - b * lr              g in place of b without momentum
/// ```
///
/// The buffer starts at zero, so that the first b is g, as in `torch.optim.SGD`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sgd {
    base: OptimizerBase,
    momentum: f64,
}

impl Optimizer for Sgd {
    fn base(&self) -> &OptimizerBase {
        &self.base
    }

    fn state(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.apply_at(Level::detect(), slice, hyper)
    }

    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        let c = self.scalars(hyper);
        let scalar = |x: f32| tch::Scalar::from(f64::from(x));
        let update = |slice: &TensorSlice<'_>| {
            let _guard = tch::no_grad_guard();
            let mut p = slice.master.shallow_clone();
            let mut g = slice.grad.f_mul_scalar(scalar(c.grad_scale))?;
            if c.decay != 0.0 {
                let _ = g.f_add_(&p.f_mul_scalar(scalar(c.decay))?)?;
            }
            let u = match slice.state {
                [buffer] => {
                    let mut b = buffer.shallow_clone();
                    let _ = b.f_mul_scalar_(scalar(c.momentum))?;
                    let _ = b.f_add_(&g)?;
                    b.f_mul_scalar_out(&g, scalar(c.lr))?
                }
                _ => g.f_mul_scalar_(scalar(c.lr))?,
            };
            let _ = p.f_sub_(&u)?;
            if let Some(out) = slice.out {
                out.shallow_clone().f_copy_(&p)?;
            }
            Ok(())
        };
        match self.state().len() {
            0 => checks::pieces::<0>("sgd", slice, update),
            _ => checks::pieces::<1>("sgd", slice, update),
        }
    }
}

impl Sgd {
    /// [`Optimizer::apply`] with a given instruction set.
    fn apply_at(&self, level: Level, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        let c = self.scalars(hyper);
        if self.momentum == 0.0 {
            let (master, grad, [], out) = checks::host::<0>("sgd", slice)?;
            let mut none = vec![(); master.len()];
            run::<()>(level, master, grad, &mut none, out, c);
        } else {
            let (master, grad, [buffer], out) = checks::host::<1>("sgd", slice)?;
            run::<f32>(level, master, grad, buffer, out, c);
        }
        Ok(())
    }

    fn scalars(&self, hyper: &Hyper) -> Scalars {
        Scalars {
            grad_scale: hyper.grad_scale,
            decay: hyper.weight_decay as f32,
            momentum: self.momentum as f32,
            lr: hyper.lr as f32,
        }
    }
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    decay: f32,
    momentum: f32,
    lr: f32,
}

/// A momentum buffer's element, or `()` for none.
trait Momentum: Copy {
    /// The new element.
    fn push(self, momentum: f32, g: f32) -> Self;
    /// The direction of the step.
    fn direction(self, g: f32) -> f32;
}

impl Momentum for () {
    #[inline(always)]
    fn push(self, _: f32, _: f32) {}

    #[inline(always)]
    fn direction(self, g: f32) -> f32 {
        g
    }
}

impl Momentum for f32 {
    #[inline(always)]
    fn push(self, momentum: f32, g: f32) -> f32 {
        self * momentum + g
    }

    #[inline(always)]
    fn direction(self, _: f32) -> f32 {
        self
    }
}

struct Update<'a, M, R> {
    master: &'a mut [f32],
    grad: &'a [f32],
    buffer: &'a mut [M],
    out: &'a mut [R],
    scalars: Scalars,
}

fn run<M: Momentum>(level: Level, master: &mut [f32], grad: &[f32], buffer: &mut [M], out: Out<'_>, scalars: Scalars) {
    let mut none = vec![(); master.len()];
    macro_rules! update {
        ($out:expr) => {
            level.run(Update { master, grad, buffer, out: $out, scalars })
        };
    }
    match out {
        Out::None => update!(&mut none[..]),
        Out::Bf16(out) => update!(out),
        Out::F16(out) => update!(out),
    }
}

impl<M: Momentum, R: Round> Kernel for Update<'_, M, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.scalars.decay == 0.0 {
            update::<M, R, false>(self.master, self.grad, self.buffer, self.out, self.scalars);
        } else {
            update::<M, R, true>(self.master, self.grad, self.buffer, self.out, self.scalars);
        }
    }
}

/// The loop. As arguments the slices are known not to overlap, which as fields they are not.
#[inline(always)]
fn update<M: Momentum, R: Round, const DECAY: bool>(
    master: &mut [f32],
    grad: &[f32],
    buffer: &mut [M],
    out: &mut [R],
    c: Scalars,
) {
    let n = master.len();
    let (grad, buffer, out) = (&grad[..n], &mut buffer[..n], &mut out[..n]);
    for i in 0..n {
        let mut g = grad[i] * c.grad_scale;
        if DECAY {
            g += master[i] * c.decay;
        }
        buffer[i] = buffer[i].push(c.momentum, g);
        let p = master[i] - buffer[i].direction(g) * c.lr;
        master[i] = p;
        out[i] = R::round(p);
    }
}

#[cfg(test)]
mod tests;
