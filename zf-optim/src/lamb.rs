//! LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, algorithm 2).

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::norm::{Kernel, Level};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{GroupRule, HostSlice, Hyper, Needs, Optimizer, OptimizerBase, Out, SquareSums, TensorSlice};
use zf_core::{Error, Result};

use crate::arithmetic::{power, square_root};
use crate::checks;
use crate::round::Round;

/// Settings of LAMB.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LambConfig {
    /// Learning rate, before the schedule and the trust ratio: the relative change of a tensor's norm.
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of its square, each in [0, 1).
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay of parameters with two or more dimensions, unless groups say otherwise; added to the direction of
    /// the step before its norm is taken.
    pub weight_decay: f64,
    /// Other settings for some parameters; the first group that matches a name applies.
    pub groups: Vec<GroupRule>,
}

impl Default for LambConfig {
    fn default() -> Self {
        Self { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-6, weight_decay: 0.01, groups: Vec::new() }
    }
}

impl LambConfig {
    /// The rule.
    ///
    /// # Errors
    /// The first setting out of range, with its key.
    pub fn rule(self) -> anyhow::Result<Lamb> {
        checks::base(self.lr, self.weight_decay, &self.groups)?;
        checks::betas(self.betas)?;
        checks::eps(self.eps)?;
        Ok(Lamb {
            base: OptimizerBase { lr: self.lr, weight_decay: self.weight_decay, groups: self.groups },
            betas: self.betas,
            eps: self.eps,
        })
    }
}

impl Build<slots::Optim> for LambConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Optimizer>> {
        Ok(Arc::new(self.rule()?))
    }
}

zf_core::register!(
    slots::Optim,
    "lamb",
    LambConfig,
    "LAMB: Adam's direction, as long as the parameter's norm says",
    "lr = 2e-3\nbetas = [0.9, 0.999]\nweight_decay = 0.01"
);

/// LAMB. States: `exp_avg` (m), `exp_avg_sq` (v). Tensor sums: 0 is that of the squares of p, 1 that of u, both before
/// the step.
///
/// For update number n of an element, with the scalars computed in float64 and rounded once to float32, this sequence of
/// single float32 operations, none of them fused:
///
/// ```text
/// g = grad * grad_scale
/// m = m + (g - m) * (1 - b1)
/// v = v * b2 + (g * g) * (1 - b2)
/// d = sqrt(v) * (1 / sqrt(1 - b2^n)) + eps
/// u = (m * (1 / (1 - b1^n))) / d + p * wd
/// p = p - u * (lr trust)              trust = |p| / |u| over the whole tensor, 1 where either norm is 0
/// ```
///
/// The paper's scaling function is the identity: the trust ratio has no bounds. It serves every tensor, also norms and
/// biases, and a tensor that starts at zero leaves it with the first step, whose trust is 1.
/// [`partial`](Optimizer::partial) computes u, of the same bits, without changing m and v.
#[derive(Debug, Clone, PartialEq)]
pub struct Lamb {
    base: OptimizerBase,
    betas: [f64; 2],
    eps: f64,
}

impl Optimizer for Lamb {
    fn base(&self) -> &OptimizerBase {
        &self.base
    }

    fn needs(&self) -> Needs {
        Needs::TensorSums(2)
    }

    fn state(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn partial(&self, slice: &HostSlice<'_>, hyper: &Hyper, sums: &mut dyn SquareSums) -> Result<()> {
        self.partial_at(Level::detect(), slice, hyper, sums)
    }

    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.apply_at(Level::detect(), slice, hyper)
    }

    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        let c = self.scalars(hyper)?;
        let step = step(slice.sums, hyper)?;
        let scalar = |x: f32| tch::Scalar::from(f64::from(x));
        checks::pieces::<2>("lamb", slice, |slice| {
            let _guard = tch::no_grad_guard();
            let mut p = slice.master.shallow_clone();
            let (mut m, mut v) = (slice.state[0].shallow_clone(), slice.state[1].shallow_clone());
            let mut g = slice.grad.f_mul_scalar(scalar(c.grad_scale))?;
            let mut t = g.f_sub(&m)?;
            let _ = t.f_mul_scalar_(scalar(c.one_minus_b1))?;
            let _ = m.f_add_(&t)?;
            let _ = v.f_mul_scalar_(scalar(c.b2))?;
            let _ = g.f_square_()?;
            let _ = g.f_mul_scalar_(scalar(c.one_minus_b2))?;
            let _ = v.f_add_(&g)?;
            let mut d = square_root(&v, &g)?;
            let _ = d.f_mul_scalar_(scalar(c.correction2))?;
            let _ = d.f_add_scalar_(scalar(c.eps))?;
            let mut u = m.f_mul_scalar_out(&t, scalar(c.correction1))?;
            let _ = u.f_div_(&d)?;
            let _ = u.f_add_(&p.f_mul_scalar_out(&d, scalar(c.decay))?)?;
            let _ = u.f_mul_scalar_(scalar(step))?;
            let _ = p.f_sub_(&u)?;
            if let Some(out) = slice.out {
                out.shallow_clone().f_copy_(&p)?;
            }
            Ok(())
        })
    }
}

impl Lamb {
    /// [`Optimizer::partial`] with a given instruction set.
    fn partial_at(&self, level: Level, slice: &HostSlice<'_>, hyper: &Hyper, sums: &mut dyn SquareSums) -> Result<()> {
        // The directions of a chunk stay in the first cache, and the rule needs no memory of the tensor's size.
        const CHUNK: usize = 1024;
        let scalars = self.scalars(hyper)?;
        checks::lengths::<2>("lamb", slice)?;
        sums.add(0, slice.master);
        let mut u = [0.0; CHUNK];
        for start in (0..slice.master.len()).step_by(CHUNK) {
            let range = start..slice.master.len().min(start + CHUNK);
            let u = &mut u[..range.len()];
            level.run(Direction {
                master: &slice.master[range.clone()],
                grad: &slice.grad[range.clone()],
                m: &slice.state[0][range.clone()],
                v: &slice.state[1][range],
                u,
                scalars,
            });
            sums.add(1, u);
        }
        Ok(())
    }

    /// [`Optimizer::apply`] with a given instruction set.
    fn apply_at(&self, level: Level, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        let scalars = self.scalars(hyper)?;
        let step = step(slice.sums, hyper)?;
        let (master, grad, [m, v], out) = checks::host::<2>("lamb", slice)?;
        let mut none = vec![(); master.len()];
        macro_rules! update {
            ($out:expr) => {
                level.run(Update { master, grad, m, v, out: $out, scalars, step })
            };
        }
        match out {
            Out::None => update!(&mut none[..]),
            Out::Bf16(out) => update!(out),
            Out::F16(out) => update!(out),
        }
        Ok(())
    }

    fn scalars(&self, hyper: &Hyper) -> Result<Scalars> {
        checks::count("lamb", hyper)?;
        let [b1, b2] = self.betas;
        Ok(Scalars {
            grad_scale: hyper.grad_scale,
            one_minus_b1: (1.0 - b1) as f32,
            b2: b2 as f32,
            one_minus_b2: (1.0 - b2) as f32,
            correction1: (1.0 / (1.0 - power(b1, hyper.count))) as f32,
            correction2: (1.0 / (1.0 - power(b2, hyper.count)).sqrt()) as f32,
            eps: self.eps as f32,
            decay: hyper.weight_decay as f32,
        })
    }
}

/// Learning rate times trust ratio.
fn step(sums: &[f64], hyper: &Hyper) -> Result<f32> {
    let &[parameter, direction] = sums else {
        return Err(Error::Engine(format!("lamb needs 2 sums over the whole tensor, found {}", sums.len())));
    };
    // Only zero is excepted: a sum that is not a number must stay visible.
    let trust = if parameter == 0.0 || direction == 0.0 { 1.0 } else { parameter.sqrt() / direction.sqrt() };
    Ok((hyper.lr * trust) as f32)
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    one_minus_b1: f32,
    b2: f32,
    one_minus_b2: f32,
    correction1: f32,
    correction2: f32,
    eps: f32,
    decay: f32,
}

/// New m and v of an element, and its u.
#[inline(always)]
fn direction(p: f32, grad: f32, m: f32, v: f32, c: Scalars) -> (f32, f32, f32) {
    let g = grad * c.grad_scale;
    let m = m + (g - m) * c.one_minus_b1;
    let v = v * c.b2 + (g * g) * c.one_minus_b2;
    let d = v.sqrt() * c.correction2 + c.eps;
    (m, v, (m * c.correction1) / d + p * c.decay)
}

struct Direction<'a> {
    master: &'a [f32],
    grad: &'a [f32],
    m: &'a [f32],
    v: &'a [f32],
    u: &'a mut [f32],
    scalars: Scalars,
}

impl Kernel for Direction<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        directions(self.master, self.grad, self.m, self.v, self.u, self.scalars);
    }
}

/// The loop of [`Optimizer::partial`]. As arguments the slices are known not to overlap, which as fields they are not.
#[inline(always)]
fn directions(master: &[f32], grad: &[f32], m: &[f32], v: &[f32], u: &mut [f32], c: Scalars) {
    let n = u.len();
    let (master, grad, m, v) = (&master[..n], &grad[..n], &m[..n], &v[..n]);
    for i in 0..n {
        u[i] = direction(master[i], grad[i], m[i], v[i], c).2;
    }
}

struct Update<'a, R> {
    master: &'a mut [f32],
    grad: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    out: &'a mut [R],
    scalars: Scalars,
    step: f32,
}

impl<R: Round> Kernel for Update<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        update(self.master, self.grad, self.m, self.v, self.out, self.scalars, self.step);
    }
}

/// The loop of [`Optimizer::apply`].
#[inline(always)]
fn update<R: Round>(
    master: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    out: &mut [R],
    c: Scalars,
    step: f32,
) {
    let n = master.len();
    let (grad, m, v, out) = (&grad[..n], &mut m[..n], &mut v[..n], &mut out[..n]);
    for i in 0..n {
        let u;
        (m[i], v[i], u) = direction(master[i], grad[i], m[i], v[i], c);
        let p = master[i] - u * step;
        master[i] = p;
        out[i] = R::round(p);
    }
}

#[cfg(test)]
mod tests;
