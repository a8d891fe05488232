from __future__ import annotations
import torch
class HotBuffers:
    def __init__(self, store, tables, max_rows):
        self.store=store; self.tables=tables; self.state={}; self.c=dict(references=0,resident=0,hits=0,loads=0,spills=0,dropped=0,h2d_bytes=0)
    def release(self, states): pass
    def reset(self, state):
        for g in range(self.tables.groups): self.state[(g,state.row)]=({}, {}, 0)
    def lease_changed(self, state): pass
    def invalidate(self, segments):
        for s in segments:
            for g in range(self.tables.groups):
                m,st,_=self.state[(g,s.row)]
                for p in range(s.start,s.end):
                    if p in m: st.pop(p); m.pop(p)
    def counters(self): return dict(self.c)
    def locate(self, group, chosen, rows):
        bs=self.store.block_size
        out=torch.zeros_like(chosen,dtype=torch.int64)
        for i,row in enumerate(rows.tolist()):
            res=self.tables.resident[group,row].tolist(); src=self.tables.source[row].tolist(); hot=self.tables.hot[group,row].tolist()
            nh=sum(1 for h in hot if h)
            cap=nh*bs
            m,st,T=self.state[(group,row)]
            T+=1
            pos=chosen[i].tolist()
            host=[p for p in pos if p>=0 and res[p//bs]<=0]
            self.c["references"]+=sum(p>=0 for p in pos); self.c["resident"]+=sum(p>=0 for p in pos)-len(host)
            hits=[p for p in host if p in m]; miss=[p for p in host if p not in m]
            for p in hits: st[p]=T
            self.c["hits"]+=len(hits); self.c["loads"]+=len(miss)
            assert len(host)<=cap,(len(host),cap)
            used=set(m.values()); free=[s for s in range(cap) if s not in used]
            vict=sorted((q for q in m if st[q]!=T),key=lambda q:(st[q],q))
            while len(free)<len(miss):
                q=vict.pop(0); free.append(m.pop(q)); st.pop(q)
            for p,s in zip(miss,free):
                m[p]=s; st[p]=T
                b=hot[s//bs]; r=b*self.store.block_rows+s%bs
                assert src[p//bs]>0
                h=src[p//bs]*bs+p%bs
                for l in self.store.geometry.group_layers(group):
                    self.store.rows[r+self.store.layer_base[l]]=self.store.host_rows[l][h]
            self.state[(group,row)]=(m,st,T)
            o=[]
            for p in pos:
                if p<0: o.append(0)
                elif res[p//bs]>0: o.append(res[p//bs]*self.store.block_rows+p%bs)
                else:
                    s=m[p]; o.append(hot[s//bs]*self.store.block_rows+s%bs)
            out[i]=torch.tensor(o)
        return out, chosen>=0
