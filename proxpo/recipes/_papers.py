"""Papers of the methods: title, authors as far as they are known, year; one table for all uses.

Methods without an entry (their titles are not known here) cite the arXiv number alone.
"""

import re
from typing import NamedTuple

from proxpo.recipes._registry import Method


class Paper(NamedTuple):
    """Facts of a citation. authors: in BibTeX's form, "and others" where the rest is not known."""

    title: str
    authors: str = ""
    year: int | None = None
    note: str = ""


# By arXiv number; the year is that of the number.
ARXIV = {
    "1502.05477": Paper(
        "Trust Region Policy Optimization",
        "John Schulman and Sergey Levine and Pieter Abbeel and Michael Jordan and Philipp Moritz",
    ),
    "1707.06347": Paper(
        "Proximal Policy Optimization Algorithms",
        "John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov",
    ),
    "1905.01756": Paper(
        "P3O: Policy-on Policy-off Policy Optimization",
        "Rasool Fakoor and Pratik Chaudhari and Alexander J. Smola",
    ),
    "2005.09814": Paper(
        "Mirror Descent Policy Optimization",
        "Tomar and others",
    ),
    "2204.07615": Paper(
        "TabNAS: Rejection Sampling for Neural Architecture Search on Tabular Datasets",
        "Yang and others",
    ),
    "2305.16381": Paper(
        "DPOK: Reinforcement Learning for Fine-tuning Text-to-Image Diffusion Models",
        "Fan and others",
    ),
    "2305.18290": Paper(
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "Rafael Rafailov and Archit Sharma and Eric Mitchell and Stefano Ermon and "
        "Christopher D. Manning and Chelsea Finn",
    ),
    "2311.04082": Paper(
        "Time-Efficient Reinforcement Learning with Stochastic Stateful Policies",
        "Al-Hafez and others",
    ),
    "2311.08290": Paper(
        "On-Policy Policy Gradient Reinforcement Learning Without On-Policy Sampling",
        "Corrado and Hanna",
    ),
    "2312.05405": Paper(
        "Guaranteed Trust Region Optimization via Two-Phase KL Penalization",
        "Zentner and others",
    ),
    "2402.03300": Paper(
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Xiao Bi"
        " and Haowei Zhang and Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo",
    ),
    "2402.14740": Paper(
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human "
        "Feedback in LLMs",
        "Ahmadian and others",
    ),
    "2411.15370": Paper(
        "Deep Policy Gradient Methods Without Batch Updates, Target Networks, or Replay Buffers",
        "Vasan and others",
    ),
    "2501.03262": Paper(
        "Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
        "Hu and others",
    ),
    "2503.14476": Paper(
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        "Q. Yu and Z. Zhang and R. Zhu and others",
    ),
    "2503.20783": Paper(
        "Understanding R1-Zero-Like Training: A Critical Perspective",
        "Z. Liu and C. Chen and W. Li and P. Qi and T. Pang and C. Du and W. S. Lee and M. Lin",
    ),
    "2503.22342": Paper(
        "CPPO: Accelerating the Training of Group Relative Policy Optimization-Based "
        "Reasoning Models",
    ),
    "2504.11713": Paper(
        "Adjoint Sampling: Highly Scalable Diffusion Samplers via Adjoint Matching",
        "Havens and others",
    ),
    "2505.12929": Paper(
        "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs",
        "Z. Yang and X. Luo and Z. Wang and D. Han and Z. He and D. Li and Y. Xu",
    ),
    "2505.13308": Paper(
        "Seek in the Dark: Reasoning via Test-Time Instance-Level Policy Gradient in Latent Space",
    ),
    "2505.22338": Paper(
        "Text2Grad: Reinforcement Learning from Natural Language Feedback",
    ),
    "2505.22617": Paper(
        "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
        "G. Cui and Y. Zhang and J. Chen and L. Yuan and Z. Wang and Y. Zuo and H. Li and Y. "
        "Fan and H. Chen and W. Chen and Z. Liu and H. Peng and L. Bai and W. Ouyang and Y. "
        "Cheng and B. Zhou and N. Ding",
    ),
    "2505.23585": Paper(
        "On-Policy RL with Optimal Reward Baseline",
        "Y. Hao and L. Dong and X. Wu and S. Huang and Z. Chi and F. Wei",
    ),
    "2506.01939": Paper(
        "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement "
        "Learning for LLM Reasoning",
        "S. Wang and L. Yu and C. Gao and C. Zheng and S. Liu and R. Lu and K. Dang and X. "
        "Chen and J. Yang and Z. Zhang and Y. Liu and A. Yang and A. Zhao and Y. Yue and S. "
        "Song and B. Yu and G. Huang and J. Lin",
    ),
    "2506.18631": Paper(
        "ReDit: Reward Dithering for Improved LLM Policy Optimization",
    ),
    "2507.06892": Paper(
        "Squeeze the Soaked Sponge: Efficient Off-policy Reinforcement Finetuning for Large "
        "Language Model",
    ),
    "2507.18071": Paper(
        "Group Sequence Policy Optimization",
        "Chujie Zheng and Shixuan Liu and Mingze Li and Xiong-Hui Chen and Bowen Yu and Chang Gao "
        "and Kai Dang and Yuqiong Liu and Rui Men and An Yang and Jingren Zhou and Junyang Lin",
    ),
    "2507.20673": Paper(
        "Geometric-Mean Policy Optimization",
        "Yuzhong Zhao and Yue Liu and Junpeng Liu and Jingye Chen and Xun Wu and Yaru Hao and"
        " Tengchao Lv and Shaohan Huang and Lei Cui and Qixiang Ye and Fang Wan and Furu Wei",
    ),
    "2508.03772": Paper(
        "GTPO: Stabilizing GRPO via Gradient and Entropy Control",
    ),
    "2509.01684": Paper(
        "Reinforcement Learning for Machine Learning Engineering Agents",
    ),
    "2509.02333": Paper(
        "DCPO: Dynamic Clipping Policy Optimization",
    ),
    "2509.02479": Paper(
        "SimpleTIR: End-to-End Reinforcement Learning for Multi-Turn Tool-Integrated Reasoning",
    ),
    "2509.02522": Paper(
        "Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR",
    ),
    "2509.09265": Paper(
        "Harnessing Uncertainty: Entropy-Modulated Policy Gradients for Long-Horizon LLM Agents",
    ),
    "2509.21282": Paper(
        "It's Not You, It's Clipping: A Soft Trust-Region via Probability Smoothing for LLM RL",
    ),
    "2509.23166": Paper(
        "Test-Time Policy Adaptation for Enhanced Multi-Turn Interactions with LLMs",
    ),
    "2509.25849": Paper(
        "Knapsack RL: Unlocking Exploration of LLMs via Optimizing Budget Allocation",
    ),
    "2510.00819": Paper(
        "Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning",
        "Melo and Abate and Gal",
    ),
    "2510.03515": Paper(
        "RAPID: An Efficient Reinforcement Learning Algorithm for Small Language Models",
    ),
    "2510.04072": Paper(
        "Slow-Fast Policy Optimization: Reposition-Before-Update for LLM Reasoning",
    ),
    "2510.06062": Paper(
        "ASPO: Asymmetric Importance Sampling Policy Optimization",
    ),
    "2510.10168": Paper(
        "Concise Reasoning in the Lens of Lagrangian Optimization",
    ),
    "2510.18072": Paper(
        "Fine-tuning Flow Matching Generative Models with Intermediate Feedback",
        "Fan and others",
    ),
    "2510.18927": Paper(
        "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy "
        "Optimization with Adaptive Clipping",
    ),
    "2510.22319": Paper(
        "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated Clipping",
    ),
    "2511.12033": Paper(
        "EARL: Entropy-Aware RL Alignment of LLMs for Reliable RTL Code Generation",
    ),
    "2511.20347": Paper(
        "Soft Adaptive Policy Optimization",
        "Chengyu Gao and Chujie Zheng and Xiong-Hui Chen and Kai Dang and Shixuan Liu and Bowen Yu "
        "and An Yang and Shuai Bai and Jingren Zhou and Junyang Lin",
    ),
    "2511.20718": Paper(
        "ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training",
    ),
    "2511.21395": Paper(
        "Monet: Reasoning in Latent Visual Space Beyond Images and Language",
    ),
    "2512.15687": Paper(
        "Can LLMs Guide Their Own Exploration? Gradient-Guided Reinforcement Learning for LLM"
        " Reasoning",
        "Liang and others",
    ),
    "2512.16848": Paper(
        "Meta-RL Induces Exploration in Language Agents",
    ),
    "2512.22733": Paper(
        "FoldAct: Efficient and Stable Context Folding for Long-Horizon Search Agents",
    ),
    "2512.23353": Paper(
        "ISOPO: Proximal policy gradients without pi-old",
        "Nilin Abrahamsen",
    ),
    "2601.10498": Paper("", "Nilin Abrahamsen"),
    "2602.04879": Paper(
        "Rethinking the Trust Region in LLM Reinforcement Learning",
        "Penghui Qi and Xiangxin Zhou and Zichen Liu and Tianyu Pang and Chao Du and Min Lin "
        "and Wee Sun Lee",
    ),
    "2602.10609": Paper(
        "Online Causal Kalman Filtering for Stable and Effective Policy Optimization",
        "Shuo He and Lang Feng and Xin Cheng and Lei Feng and Bo An",
    ),
    "2602.10693": Paper(
        "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM "
        "Training",
        "Guobin Shen and Chenxiao Zhao and Xiang Cheng and Lei Huang and Xing Yu",
    ),
    "2605.12380": Paper(
        "Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training",
        "Alexander J. Smola and Murdock Aubry and Nicholas Stranges and Rasool Fakoor",
    ),
}
# Methods whose paper has no arXiv number.
OTHERS = {
    "ema-kpo": Paper(
        "EMA-KPO: Simplifying Kalman Policy Optimization with Fixed-Gain Exponential Smoothing",
        "{FARS}",
    ),
    "reinforce": Paper(
        "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
        "R. J. Williams",
        1992,
        "Machine Learning 8",
    ),
    "tis": Paper(
        "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
        "Yao and others",
        2025,
    ),
}


def find_paper(entry: Method) -> tuple[str, Paper | None]:
    """The arXiv number of the method's paper, empty without one, and its facts if known."""
    found = re.search(r"arXiv:(\d{4}\.\d{4,5})", entry.paper)
    number = found[1] if found else ""
    return number, OTHERS.get(entry.slug) or ARXIV.get(number)


def bibtex(entry: Method) -> str:
    """BibTeX of the method's paper; a field that is not known is left out."""
    number, paper = find_paper(entry)
    title = f"{{{paper.title}}}" if paper and paper.title else ""
    fields = {"title": title, "author": paper.authors} if paper else {}
    if paper and (paper.year or not number):
        fields |= {"year": str(paper.year or ""), "howpublished": paper.note}
    elif number:
        fields |= {
            "year": f"20{number[:2]}",
            "eprint": number,
            "archivePrefix": "arXiv",
            "url": f"https://arxiv.org/abs/{number}",
        }
    fields = fields or {"note": entry.paper}
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@misc{{{entry.slug},", *lines, "}"])


__all__ = ["Paper", "bibtex", "find_paper"]
