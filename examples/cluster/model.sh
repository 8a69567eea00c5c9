# What both pretrain.sh train: a model of 8 billion parameters on made-up data. For `source`; sets MODEL, TRAINING, DATA.
#
# Run: see the scripts that read it. Not run: by itself.
TP=${TP:-2}
CP=${CP:-$((${PER_NODE:-8} * ${NNODES:-1} / TP))}
SEQ=${SEQ:-$((16384 * CP))}
export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL=(--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 500000
    --seq-length "$SEQ" --max-position-embeddings "$SEQ"
    --tensor-model-parallel-size "$TP" --sequence-parallel --context-parallel-size "$CP"
    --attention-dropout 0 --hidden-dropout 0)
TRAINING=(--bf16 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-4 --min-lr 1e-5
    --lr-decay-style cosine --clip-grad 1.0 --no-gradient-accumulation-fusion --distributed-backend nccl
    --log-interval 1 --eval-iters 0)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
