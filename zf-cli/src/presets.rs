//! The built-in presets: named sets of stages that a run file builds on with `preset = "name"`.

zf_core::register_preset!(
    "zero-0",
    "plain data parallelism: every rank holds parameters, gradients and optimizer states",
    "[partition]\nkind = \"zero\"\nstage = 0"
);

zf_core::register_preset!(
    "zero-1",
    "ZeRO stage 1: optimizer states and masters split over the ranks",
    "[partition]\nkind = \"zero\"\nstage = 1"
);
